"""A tiny random model that sees: the MLA model of the other tests behind a small vision tower.

Kimi-VL is the architecture of vLLM that joins the two. As with the text model, the weights have a real model's scale,
so that every token after a picture depends on its pixels.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rd2h.demo.model import BYTES, SPECIAL_TOKENS, ModelShape

# Not imported here: it needs transformers, which only engines have to import.
PROCESSOR = Path(__file__).with_name("picture_processor.py")
IMAGE_TOKEN = "<image>"
IMAGE_ID = BYTES + len(SPECIAL_TOKENS)
PATCH = 14
MERGE = (2, 2)
# Larger pictures are shrunk to so many patches.
PATCH_LIMIT = 64
_HIDDEN, _MLP, _LAYERS, _HEADS, _GRID = 64, 128, 2, 4, 8
_GAIN = 2.0
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE_TOKEN + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_picture_model(text_model: Path, folder: Path) -> Path:
    """Writes the model into `folder`, its language part taken from `text_model`; returns the folder."""
    from safetensors.numpy import load_file, save_file

    def load(name: str) -> Any:
        return json.loads((text_model / name).read_text(encoding="utf-8"))

    def dump(name: str, value: object) -> None:
        (folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    shutil.copy(PROCESSOR, folder)
    classes = {
        "AutoProcessor": f"{PROCESSOR.stem}.TinyProcessor",
        "AutoImageProcessor": f"{PROCESSOR.stem}.TinyImageProcessor",
    }
    dump("config.json", _config(load("config.json")))
    dump("generation_config.json", load("generation_config.json"))
    tokenizer = load("tokenizer.json")
    mark = {**tokenizer["added_tokens"][-1], "id": IMAGE_ID, "content": IMAGE_TOKEN}
    dump("tokenizer.json", {**tokenizer, "added_tokens": [*tokenizer["added_tokens"], mark]})
    dump("tokenizer_config.json", {**load("tokenizer_config.json"), "chat_template": _CHAT_TEMPLATE})
    dump("processor_config.json", {"auto_map": classes, "image_token": IMAGE_TOKEN})
    sizes = {"patch_size": PATCH, "merge_kernel_size": MERGE, "in_token_limit": PATCH_LIMIT}
    dump("preprocessor_config.json", {"auto_map": classes, **sizes})
    language = load_file(text_model / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in language.items()} | _vision_weights()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(text: dict[str, Any]) -> dict[str, Any]:
    vision = {
        "model_type": "moonvit",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "init_pos_emb_height": _GRID,
        "init_pos_emb_width": _GRID,
        "patch_size": PATCH,
        "merge_kernel_size": MERGE,
    }
    same = {key: text[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")}
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": IMAGE_ID,
        "pad_token_id": BYTES,
        **same,
    }


def _vision_weights() -> dict[str, NDArray[np.float32]]:
    """Vision tower and projector; projections have shape (out, in)."""
    random = np.random.default_rng(20261)
    tensors: dict[str, NDArray[np.float32]] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        weight = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(_GAIN / columns**0.5)
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = weight, np.zeros(rows, dtype=np.float32)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = np.ones(_HIDDEN, dtype=np.float32)
        tensors[f"{name}.bias"] = np.zeros(_HIDDEN, dtype=np.float32)

    embed = "vision_tower.patch_embed"
    linear(f"{embed}.proj", _HIDDEN, 3 * PATCH * PATCH)
    tensors[f"{embed}.proj.weight"] = tensors[f"{embed}.proj.weight"].reshape(_HIDDEN, 3, PATCH, PATCH)
    tensors[f"{embed}.pos_emb.weight"] = random.standard_normal((_GRID, _GRID, _HIDDEN), dtype=np.float32)
    for layer in range(_LAYERS):
        block = f"vision_tower.encoder.blocks.{layer}"
        norm(f"{block}.norm0")
        norm(f"{block}.norm1")
        linear(f"{block}.wqkv", 3 * _HIDDEN, _HIDDEN)
        linear(f"{block}.wo", _HIDDEN, _HIDDEN)
        linear(f"{block}.mlp.fc0", _MLP, _HIDDEN)
        linear(f"{block}.mlp.fc1", _HIDDEN, _MLP)
    norm("vision_tower.encoder.final_layernorm")
    merged = _HIDDEN * MERGE[0] * MERGE[1]
    norm("multi_modal_projector.pre_norm")
    linear("multi_modal_projector.linear_1", merged, merged)
    linear("multi_modal_projector.linear_2", ModelShape().hidden_size, merged)
    return tensors
