"""Tiny models with random weights, made on this machine."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

VOCABULARY = 512
"""Token ids of the model. Ids below FIRST_TOKEN are special."""

FIRST_TOKEN = 3

IMAGE = VOCABULARY
"""Token id that stands for an image in a prompt of the model that make_llava writes."""

IMAGE_TOKENS = 65
"""Of 64 patches and of the class token: vLLM's LoRA takes the vision tower to have as many tokens as the prompt has for the image."""


def make_llama(directory: Path, *, hidden: int = 128, layers: int = 4, positions: int = 4096, seed: int = 0, **config: Any) -> Path:
    """Write a Llama model in float32 and a byte-level tokenizer to the directory, and return the directory.

    Another seed makes other weights of the same shape, as a weight update does. With transformers' default spread of
    the weights a random model repeats one token for ever, and a test that compares tokens would prove little; here
    the spread is wide enough that each token depends on the whole prompt.
    """
    import torch
    from transformers import LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(positions).save_pretrained(directory)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_llama_config(hidden=hidden, layers=layers, positions=positions, **config))
    model.to(torch.float32).save_pretrained(directory, safe_serialization=True)
    return directory


def _llama_config(*, hidden: int, layers: int, positions: int, **config: Any) -> Any:
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": positions,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**settings, **config})


_CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}"
)


def make_llava(directory: Path) -> Path:
    """Write a LLaVA model in float32 with its tokenizer and image processor to the directory, and return the directory.

    In a prompt, IMAGE stands for an image, which takes IMAGE_TOKENS tokens. The chat template is the texts and images of all messages, one
    after the other.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    positions, patch = 4096, 8
    side = patch * math.isqrt(IMAGE_TOKENS - 1)
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=side, patch_size=patch,
        projection_dim=64,
    )  # fmt: skip
    text = _llama_config(hidden=128, layers=4, positions=positions, vocab_size=VOCABULARY + 64)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=IMAGE_TOKENS,
        initializer_range=0.15,
        vision_feature_select_strategy="full",
    )
    LlavaForConditionalGeneration(config).to(torch.float32).save_pretrained(directory, safe_serialization=True)
    # vLLM reads the names that LLaVA's released checkpoints have. transformers writes the vision tower under shorter ones.
    file = directory / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer=_tokenizer(positions, {"<image>": IMAGE}),
        patch_size=patch,
        vision_feature_select_strategy="full",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=_CHAT,
    ).save_pretrained(directory)
    return directory


def make_mamba(directory: Path) -> Path:
    """Write a Mamba model, whose layers have recurrent state and no attention, to the directory, and return the directory."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM

    _tokenizer(4096).save_pretrained(directory)
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=128, state_size=16, num_hidden_layers=2)
    MambaForCausalLM(config).to(torch.float32).save_pretrained(directory, safe_serialization=True)
    return directory


def make_llama4(directory: Path, *, chunk: int) -> Path:
    """Write a Llama 4 model of text as make_llama does: in three of four layers a token reads the last chunk of ``chunk`` tokens alone."""
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    _tokenizer(4096).save_pretrained(directory)
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, intermediate_size_mlp=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, attention_chunk_size=chunk,
        layer_types=["chunked_attention"] * 3 + ["full_attention"], no_rope_layers=[1, 1, 1, 0], moe_layers=[],
        interleave_moe_layer_step=0, num_local_experts=2, initializer_range=0.15, bos_token_id=1, eos_token_id=2, pad_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    Llama4ForCausalLM(config).to(torch.float32).save_pretrained(directory, safe_serialization=True)
    return directory


def make_lfm2(directory: Path) -> Path:
    """Write an LFM2 model as make_llama does: two layers with recurrent state, of a short convolution, and two with full attention."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    hidden, wide = 128, 256
    _tokenizer(4096).save_pretrained(directory)
    torch.manual_seed(0)
    # The released models have the settings conv_* and block_*, which vLLM reads and transformers does not.
    config = Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3, max_position_embeddings=4096,
        initializer_range=0.15, bos_token_id=1, eos_token_id=2, pad_token_id=None, tie_word_embeddings=True, conv_dim=hidden,
        conv_dim_out=hidden, block_dim=hidden, block_ff_dim=wide, block_multiple_of=32, block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    Lfm2ForCausalLM(config).to(torch.float32).save_pretrained(directory, safe_serialization=True)
    return directory


def make_adapter(directory: Path, model: Path, *, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter of a model's attention, as PEFT saves it, to the directory, and return the directory. Of a model of
    make_llava it is an adapter of the vision tower too.

    Its weights are random and large enough that the tokens are others than those of the model and of another seed.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    parts = {"model.layers": config}
    if "vision_config" in config:
        parts = {
            "model.language_model.layers": config["text_config"],
            "model.vision_tower.vision_model.encoder.layers": config["vision_config"],
        }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layers, shape in parts.items():
        hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
        head, pairs = shape.get("head_dim", hidden // heads), shape.get("num_key_value_heads", heads)
        for layer in range(shape["num_hidden_layers"]):
            for module, count in {"q_proj": heads, "k_proj": pairs, "v_proj": pairs}.items():
                name = f"base_model.model.{layers}.{layer}.self_attn.{module}"
                weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.3
                weights[f"{name}.lora_B.weight"] = torch.randn(count * head, rank, generator=generator) * 0.3
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    targets = ["k_proj", "q_proj", "v_proj"]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def make_minicpm(directory: Path, *, hidden: int = 128, layers: int = 4, positions: int = 4096, seed: int = 0) -> Path:
    """Write a MiniCPM3 model as make_llama does: its KV is latent, the same for all heads."""
    import torch
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(positions).save_pretrained(directory)
    torch.manual_seed(seed)
    heads = 4
    config = MiniCPM3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, q_lora_rank=hidden // 2, kv_lora_rank=hidden // 4, qk_nope_head_dim=hidden // heads,
        qk_rope_head_dim=16, v_head_dim=hidden // heads, max_position_embeddings=positions, initializer_range=0.15, bos_token_id=1,
        eos_token_id=2, pad_token_id=None, tie_word_embeddings=False, scale_emb=1, scale_depth=1.4, dim_model_base=hidden,
    )  # fmt: skip
    MiniCPM3ForCausalLM(config).to(torch.float32).save_pretrained(directory, safe_serialization=True)
    return directory


def make_deepseek(directory: Path, *, hidden: int = 128, layers: int = 4, positions: int = 4096, seed: int = 0) -> Path:
    """Write a DeepSeek V2 model without experts as make_llama does: its KV is latent, of the sizes that vLLM's kernel for CPUs has.

    Its positions are scaled by YaRN, as DeepSeek's are. Without a scaling vLLM 0.32 on a CPU rotates wrong elements of the queries.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(positions).save_pretrained(directory)
    torch.manual_seed(seed)
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": positions // 2, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = DeepseekV2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, first_k_dense_replace=layers,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=hidden // 4, qk_rope_head_dim=64,
        v_head_dim=hidden // 4, max_position_embeddings=positions, rope_parameters=yarn, initializer_range=0.15, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False, n_routed_experts=1, n_shared_experts=1, num_experts_per_tok=1,
        moe_intermediate_size=hidden,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).to(torch.float32).save_pretrained(directory, safe_serialization=True)
    return directory


def make_spark(directory: Path, *, window: int, hidden: int = 128, layers: int = 4, positions: int = 4096, seed: int = 0) -> Path:
    """Write a Spark 2.5 model as make_llama does: every second layer reads the last ``window`` tokens alone."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(positions).save_pretrained(directory)
    heads, kv_heads, wide = 4, 2, 2 * hidden
    head = hidden // heads
    shapes = {"model.embedding": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_k_v_proj": (head * (heads + 2 * kv_heads), hidden), "self_attn.g_proj": (heads, hidden),
                "self_attn.out_proj": (hidden, head * heads), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
                "mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            }.items()
        }  # fmt: skip
    torch.manual_seed(seed)
    weights = {f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Spark2_5ForCausalLM"], "model_type": "spark2_5", "torch_dtype": "float32", "vocab_size": VOCABULARY,
        "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "sliding_window": window, "max_position_embeddings": positions,
        "layer_types": ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)],
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _tokenizer(positions: int, more: dict[str, int] | None = None) -> Any:
    """Return a tokenizer with a token for each byte, so that every text has ids, and with more special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **(more or {})}
    for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocabulary[char] = FIRST_TOKEN + i
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": list(more)} if more else {}),
    )
