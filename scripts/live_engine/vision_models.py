"""Build small random vision-language models without a hub, and images to show to them.

A folder has what those of `tiny_models` have, and a processor of images with its chat template.
Names of tensors are those of the published checkpoints, which transformers no longer writes.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from engine_ext.conformance import random_weights
from scripts.live_engine.tiny_models import ATTENTION, build_tokenizer

_IMAGE: Final = "<image>"
# The names of Gemma3's tokenizer, which SGLang's processor looks for.
_BEGIN: Final = "<start_of_image>"
_SOFT: Final = "<image_soft_token>"
_END: Final = "<end_of_image>"
# Gemma3's processor in vLLM looks for tokens of up to four newlines.
_NEWLINES: Final = {f"newlines_{n}": "\n" * n for n in range(1, 5)}
_SIZE: Final = 56  # of an image, in pixels
# SGLang shares out Gemma3's 64 position embeddings of this size; it cannot halve 16.
_GEMMA3_SIZE: Final = 112
_PATCH: Final = 14
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _SIZE,
    "patch_size": _PATCH,
}


def build(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a random model of one architecture, ``gemma3`` or ``llava``, and return its folder."""
    import transformers

    model_class, config, processor = {"gemma3": _gemma3, "llava": _llava}[kind]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.bfloat16)
        random_weights.jitter_constants(model)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = transformers.GenerationConfig(**ids)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def image_url(seed: int) -> str:
    """Return a random image as a data URL, the same for the same seed."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (60, 80, 3), generator=generator, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _gemma3() -> tuple[Any, Any, Any]:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = build_tokenizer(boi_token=_BEGIN, eoi_token=_END, image_token=_SOFT, **_NEWLINES)
    ids = _special_ids(tokenizer)
    tokens_per_image = 4
    config = transformers.Gemma3Config(
        # Wide enough for a text to see the image before it to the end.
        text_config={**ATTENTION, "sliding_window": 512, **ids},
        vision_config={**_VISION, "image_size": _GEMMA3_SIZE, "vision_use_head": False},
        mm_tokens_per_image=tokens_per_image,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
        **ids,
    )
    square = {"height": _GEMMA3_SIZE, "width": _GEMMA3_SIZE}
    processor = transformers.Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size=square),
        tokenizer=tokenizer,
        image_seq_length=tokens_per_image,
        chat_template=_chat_template(_BEGIN),
    )
    return transformers.Gemma3ForConditionalGeneration, config, processor


def _llava() -> tuple[Any, Any, Any]:
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = build_tokenizer(image_token=_IMAGE)
    ids = _special_ids(tokenizer)
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **ATTENTION, **ids},
        vision_config={"model_type": "clip_vision_model", **_VISION, "projection_dim": 64},
        image_token_index=tokenizer.image_token_id,
        image_seq_length=(_SIZE // _PATCH) ** 2,
        **ids,
    )
    square = {"height": _SIZE, "width": _SIZE}
    processor = transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": _SIZE}, crop_size=square),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=_IMAGE,
        chat_template=_chat_template(_IMAGE),
    )
    return transformers.LlavaForConditionalGeneration, config, processor


def _special_ids(tokenizer: Any) -> dict[str, int]:
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return {"bos_token_id": eos, "eos_token_id": eos, "pad_token_id": pad}


def _chat_template(placeholder: str) -> str:
    """Return a template that writes a message's texts, and the placeholder for its images."""
    part = "{% if part.type == 'image' %}" + placeholder + "{% else %}{{ part.text }}{% endif %}"
    parts = "{% for part in message.content %}" + part + "{% endfor %}"
    text = "{% if message.content is string %}{{ message.content }}{% else %}" + parts
    return "{% for message in messages %}" + text + "{% endif %}{% endfor %}"
