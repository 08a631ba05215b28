"""Rewrites a zip archive without recompressing what stays the same. Knows nothing of wheels.

Unchanged members are copied compressed and new ones are stored, so the bytes depend on the
content alone, not on the zlib that happens to be installed.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zipfile import ZipFile, ZipInfo

from pdlaunch.errors import PdError

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_VERSION_UNIX = (3 << 8) | 20
_UTF8_NAME = 0x800
_DATE_1980_01_01 = (1 << 5) | 1
_STORED = 0
_LIMIT_BYTES = 0xFFFFFFFF


@dataclass(frozen=True)
class _Member:
    name: str
    method: int
    crc: int
    compressed_bytes: int
    size_bytes: int
    executable: bool
    offset: int

    @property
    def _common(self) -> tuple[int, ...]:
        return (
            20,
            _UTF8_NAME,
            self.method,
            0,
            _DATE_1980_01_01,
            self.crc,
            self.compressed_bytes,
            self.size_bytes,
            len(self.name.encode()),
            0,
        )

    def local_header(self) -> bytes:
        return _LOCAL.pack(b"PK\x03\x04", *self._common) + self.name.encode()

    def central_header(self) -> bytes:
        mode = 0o100755 if self.executable else 0o100644
        return (
            _CENTRAL.pack(
                b"PK\x01\x02", _VERSION_UNIX, *self._common, 0, 0, 0, mode << 16, self.offset
            )
            + self.name.encode()
        )


def rewrite(
    source: Path,
    target: Path,
    *,
    keep: Mapping[str, str],
    add: Mapping[str, bytes],
    order: Iterable[str],
) -> None:
    """Writes an archive of kept and added members.

    Args:
        source: the archive to keep members of.
        target: the archive to write.
        keep: new name to name in `source`.
        add: name to content.
        order: every new name, in the order in which to write it.
    """
    members: list[_Member] = []
    with ZipFile(source) as archive, source.open("rb") as raw, target.open("wb") as out:
        for name in order:
            if name in add:
                members.append(_store(name, add[name], out))
            else:
                members.append(_copy(name, archive.getinfo(keep[name]), raw, out))
        start = out.tell()
        out.writelines(member.central_header() for member in members)
        end = out.tell()
        if end > _LIMIT_BYTES or len(members) > 0xFFFF:
            raise PdError("the archive needs zip64, which is not supported", where=str(source))
        out.write(_END.pack(b"PK\x05\x06", 0, 0, len(members), len(members), end - start, start, 0))


def _store(name: str, content: bytes, out: BinaryIO) -> _Member:
    size = len(content)
    member = _Member(name, _STORED, zlib.crc32(content), size, size, False, out.tell())
    out.write(member.local_header())
    out.write(content)
    return member


def _copy(name: str, info: ZipInfo, raw: BinaryIO, out: BinaryIO) -> _Member:
    member = _Member(
        name,
        info.compress_type,
        info.CRC,
        info.compress_size,
        info.file_size,
        bool((info.external_attr >> 16) & 0o111),
        out.tell(),
    )
    out.write(member.local_header())
    raw.seek(info.header_offset)
    # The local header's own lengths: its extra field may differ from the central one.
    *_, name_length, extra_length = _LOCAL.unpack(raw.read(_LOCAL.size))
    raw.seek(name_length + extra_length, 1)
    _copy_bytes(raw, out, info.compress_size)
    return member


def _copy_bytes(raw: BinaryIO, out: BinaryIO, count: int) -> None:
    left = count
    while left:
        chunk = raw.read(min(left, shutil.COPY_BUFSIZE))  # type: ignore[attr-defined]
        if not chunk:
            raise PdError("the archive ends too early", where=getattr(raw, "name", None))
        out.write(chunk)
        left -= len(chunk)
