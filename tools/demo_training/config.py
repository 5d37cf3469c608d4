"""Shapes of the two shipped models, in the field names of Qwen3.5 checkpoints."""

from dataclasses import dataclass

VOCAB_SIZE = 2048
MAX_POSITIONS = 4096
CHUNK = 32


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of one `qwen3_5` hybrid; the names are those of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_key_head_dim: int
    linear_num_value_heads: int
    linear_value_head_dim: int
    mtp_num_hidden_layers: int
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    vocab_size: int = VOCAB_SIZE
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def is_linear(self, layer: int) -> bool:
        """Every `full_attention_interval`-th layer attends; the others are recurrent."""
        return (layer + 1) % self.full_attention_interval != 0


# Key and value heads differ in number and width on purpose: a swapped layout cannot pass unseen.
TARGET = ModelConfig(
    hidden_size=192,
    intermediate_size=448,
    num_hidden_layers=8,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_num_value_heads=4,
    linear_value_head_dim=64,
    mtp_num_hidden_layers=1,
)

DRAFT = ModelConfig(
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_num_value_heads=4,
    linear_value_head_dim=32,
    mtp_num_hidden_layers=0,
)
