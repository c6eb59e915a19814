"""Image classifier: a transformer on patches with any variant of attention in each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mgk._core.validation import fail, positive_integer
from mgk.models.attention_layer import AttentionConfig
from mgk.models.encoder import EncoderLayer


@dataclass(frozen=True)
class VisionConfig(AttentionConfig):
    """Configuration of a VisionTransformer.

    Attributes:
        num_classes: Number of classes.
        image_size: Height and width of the images in pixels.
        channels: Number of channels of the images.
        patch_size: Height and width of a patch in pixels; it divides image_size.
        embed_dim: Dimension of the model.
        ffn_dim: Hidden dimension of the feed-forward layers.
        num_layers: Number of layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of value heads, and of key heads by default. Default: num_heads.
        num_key_heads: Number of key heads. Default: num_kv_heads.
        head_dim: Dimension of a head. It does not depend on num_heads: models with fewer heads are smaller.
        variant: Attention variant of all layers, or one for each layer.
        num_components: Number of Gaussians per key.
        preset: Preset of the attention layers, a key of PRESETS.
        feature_map: Feature map of linear variants: "elu", "relu", "favor" or "dpfp".
        dropout: Dropout of embeddings, sublayers and feed-forward layers.
        attention_dropout: Dropout of attention weights. None selects the preset's.
        backend: Backend of the attention operators.

    Examples:
        >>> mgk.models.VisionConfig(num_classes=10, patch_size=8).max_length  # patches of an image
        16
    """

    num_classes: int
    image_size: int = 32
    channels: int = 1
    patch_size: int = 4
    embed_dim: int = 192
    ffn_dim: int = 768
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int | None = None
    num_key_heads: int | None = None
    head_dim: int = 32
    variant: str | tuple[str, ...] = "smgk"
    num_components: int = 2
    preset: str = "paper"
    feature_map: str = "elu"
    dropout: float = 0.1
    attention_dropout: float | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        sizes = "num_classes image_size channels patch_size embed_dim ffn_dim num_layers num_heads head_dim"
        for name in sizes.split():
            positive_integer(name, getattr(self, name))
        if self.image_size % self.patch_size:
            fail("patch_size", f"= {self.patch_size} must divide image_size = {self.image_size}")
        self.check_attention_fields()

    @property
    def max_length(self) -> int:  # type: ignore[override]
        """Number of patches."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def supports_packing(self) -> bool:
        """False: images have the same number of patches."""
        return False


class VisionTransformer(nn.Module):
    """Classifier of images: pre-norm layers on embedded patches, learned positions and mean pooling.

    Args:
        config: Sizes and settings.

    Examples:
        >>> model = mgk.models.VisionTransformer(mgk.models.VisionConfig(num_classes=10, patch_size=8, num_layers=1))
        >>> model(torch.rand(2, 1, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embed_dim
        self.patches = nn.Linear(config.channels * config.patch_size**2, width)
        self.positions = nn.Parameter(torch.empty(config.max_length, width))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(config, variant, index) for index, variant in enumerate(config.layer_variants)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.num_classes)
        nn.init.xavier_uniform_(self.patches.weight)
        nn.init.zeros_(self.patches.bias)
        nn.init.normal_(self.positions, std=0.02)
        # Equal logits at the start: the first loss is the logarithm of the number of classes.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits [B, num_classes].

        Args:
            images: [B, channels, image_size, image_size], uint8, or floating point in [0, 1].

        Examples:
            >>> config = mgk.models.VisionConfig(num_classes=10, channels=3, patch_size=8, num_layers=1)
            >>> images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
            >>> mgk.models.VisionTransformer(config)(images).shape
            torch.Size([2, 10])
        """
        size, channels = self.config.image_size, self.config.channels
        if images.dim() != 4 or tuple(images.shape[1:]) != (channels, size, size):
            fail("images", f"must have shape [B, {channels}, {size}, {size}], got {list(images.shape)}")
        if images.dtype == torch.uint8:
            images = images.to(self.positions.dtype) / 255
        elif not images.is_floating_point():
            fail("images", f"must be uint8 or floating point, got {images.dtype}")
        patch = self.config.patch_size
        pixels = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, C, rows, patch, columns, patch]
        pixels = pixels.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        # Centred pixels, because the mean brightness would dominate the embedding of every patch.
        x = self.dropout(self.patches(2 * pixels - 1) + self.positions)
        for layer in self.layers:
            x = layer(x, None, None, None)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits
