"""Picture processor of the tiny model with vision; copied into the model's folder, from where transformers loads it.

It does what the processor of Kimi-VL does, without torchvision: a picture is shrunk to a largest number of patches,
padded with black to whole merge windows, and cut into patches, row by row.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor


class TinyImageProcessor(BaseImageProcessor):
    """Pixels to patches of shape (patches, 3, patch_size, patch_size), -1..1."""

    model_input_names = ["pixel_values", "image_grid_hws"]  # noqa: RUF012 - transformers reads it so

    def __init__(self, patch_size: int, merge_kernel_size: Sequence[int], in_token_limit: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.merge_kernel_size = tuple(merge_kernel_size)
        self.in_token_limit = in_token_limit

    def preprocess(self, images: Any, return_tensors: str | None = None, **_kwargs: Any) -> BatchFeature:
        """Patches of all pictures in one array, and per picture its rows and columns of patches."""
        pictures = images if isinstance(images, list | tuple) else [images]
        cut = [self._patches(picture) for picture in pictures]
        data = {
            "pixel_values": np.concatenate([patches for patches, _ in cut]),
            "image_grid_hws": np.array([grid for _, grid in cut]),
        }
        return BatchFeature(data=data, tensor_type=return_tensors)

    def tokens(self, grid: Sequence[int]) -> int:
        """Placeholder tokens of a picture of so many rows and columns of patches."""
        return int(grid[0]) * int(grid[1]) // math.prod(self.merge_kernel_size)

    def _patches(self, picture: Image.Image) -> tuple[NDArray[np.float32], tuple[int, int]]:
        size = self.patch_size
        picture = picture.convert("RGB")
        count = (picture.width // size) * (picture.height // size)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            picture = picture.resize((int(picture.width * scale), int(picture.height * scale)))
        pixels = np.asarray(picture, dtype=np.float32) / 127.5 - 1.0
        tall, wide = (kernel * size for kernel in self.merge_kernel_size)
        pixels = np.pad(pixels, ((0, -pixels.shape[0] % tall), (0, -pixels.shape[1] % wide), (0, 0)))
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        patches = pixels.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
        return patches.reshape(rows * columns, 3, size, size), (rows, columns)


class TinyProcessor(ProcessorMixin):
    """Text and pictures; every picture's mark in the text becomes as many placeholder tokens as it has."""

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012 - transformers reads it so
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        image_token: str = "",
        **_kwargs: Any,
    ) -> None:
        self.image_token = image_token
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(
        self, images: Any = None, text: Any = None, return_tensors: str | None = None, **_kwargs: Any
    ) -> BatchFeature:
        """Token ids, and patches if there are pictures."""
        texts = [text] if isinstance(text, str) else text
        pictures: Any = {}
        if images is not None:
            pictures = self.image_processor(images, return_tensors=return_tensors)
            counts = iter([self.image_processor.tokens(grid) for grid in pictures["image_grid_hws"]])
            texts = [re.sub(self.image_token, lambda mark: mark[0] * next(counts), one) for one in texts]
        return BatchFeature(data={**self.tokenizer(texts, return_tensors=return_tensors), **pictures})
