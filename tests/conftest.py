"""The suite runs on the CPU, whose kernels give a row the same bits in any window."""

import mlx.core as mx
import pytest

# Before mlx_lm is imported: it makes its generation stream on the default device.
mx.set_default_device(mx.cpu)

pytest.register_assert_rewrite("zoo")
