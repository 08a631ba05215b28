"""Makes small random models with a tokenizer of their own. Arguments: a name, the folder to write.

Every run writes the same model. They are for tests: fast, fit for tensor parallelism, and with
weights large enough that each value in the KV cache shows in the outputs.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GraniteMoeHybridConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

SEED = 20260101
VOCABULARY = 512
WEIGHT_STD = 0.08
# Random queries attend to everything alike, and one wrong block among a hundred would not show.
# Longer ones attend to a few positions each; still longer ones amplify rounding.
QUERY_SCALE = 2.0
# What parameters of one dimension are filled with, by the end of their names; norms' weights
# with what they multiply by.
FILLS: Mapping[str, float] = {
    "q_norm.weight": QUERY_SCALE,
    # States that forget within some fifty tokens, not within one.
    "A_log": 0.0,
    "dt_bias": -4.0,
    "conv1d.bias": 0.0,
}

# Sizes that all of them share.
SHARED: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "tiny-qwen3": Qwen3Config(
        **SHARED,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    ),
    # Layers with and without a sliding window, in two KV cache groups.
    "tiny-gemma3": Gemma3TextConfig(
        **SHARED,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        query_pre_attn_scalar=128,
        sliding_window=200,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    # A sliding window in all layers.
    "tiny-mistral": MistralConfig(
        **SHARED,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=200,
    ),
    # Latent attention (MLA), of the one size that vLLM's CPU kernels know; dense layers only.
    "tiny-deepseek-v2": DeepseekV2Config(
        **SHARED,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=4,
    ),
    # State-space layers (Mamba 2) beside attention.
    "tiny-granite-hybrid": GraniteMoeHybridConfig(
        **SHARED,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        layer_types=["mamba", "attention", "mamba", "attention"],
        attention_multiplier=0.125,
        num_local_experts=0,
        shared_intermediate_size=512,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_expand=2,
    ),
}

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# What the merges are learned from. Any text can be encoded all the same: what no merge covers
# falls back to bytes.
CORPUS = """
A prefill engine reads the whole prompt at once and computes the keys and values of every token.
A decode engine takes these keys and values and writes the answer, one token after the other.
While the prompt is still being read, the blocks that are already final travel to the other side.
The prompt may be long or short, it may share its beginning with another one, and it may be
cancelled at any moment; nothing must be lost, nothing must be overwritten, and nobody waits.
The quick brown fox jumps over the lazy dog. What is the capital of France? How many rivers flow
through this city? Please write a short story about a lighthouse, its keeper and the winter sea.
Once upon a time there was a small machine that counted the stars above the mountains each night.
When the morning came it wrote the number into a book: one thousand, two thousand, three thousand.
system user assistant You are a helpful assistant. Answer the question. Tell me more about that.
def main(argument, value=None): return [item for item in range(0, 100) if item != value]
0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 25 30 40 50 60 70 80 90 100 1000 10000
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        sys.exit(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(name: str, eos: int, pad: int) -> PreTrainedModel:
    config = CONFIGS[name]
    config.update({"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad})
    model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        # In order of name and from a generator of our own: the library's way to initialise
        # may change between releases, the model must not.
        for key, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=WEIGHT_STD, generator=random)
            else:
                fill = next((FILLS[end] for end in FILLS if key.endswith(end)), 1.0)
                # Gemma's norms multiply by their weight plus one.
                parameter.fill_(fill - 1.0 if config.model_type == "gemma3_text" else fill)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    return model


def main(name: str, out: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_model(name, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
