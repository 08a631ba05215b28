"""Signals while a command builds and checks: none is lost, and handlers are as before."""

from __future__ import annotations

import os
import signal

import pytest

from pdlaunch.cli.up import interruptible
from pdlaunch.errors import Interrupted


class _SignalledInItsDestructor:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def _use_something() -> None:
    _SignalledInItsDestructor()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_work_where_it_is(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as stopped, interruptible():
        os.kill(os.getpid(), number)
        pytest.fail("the work went on")
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_during_a_destructor_ends_the_work_at_its_end() -> None:
    with pytest.raises(Interrupted) as stopped, interruptible():
        _use_something()
    assert stopped.value.exit_code == 128 + signal.SIGTERM
