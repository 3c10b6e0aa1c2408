"""The causal convolution of each channel by itself."""

from torch.nn import functional


def causal_conv1d(x, weight, bias=None, activation=None, **unused):
    """``x`` [batch, length, channels], ``weight`` [channels, size]; returns the convolution and no state."""
    channels, size = weight.shape
    padded = functional.pad(x.transpose(1, 2), (size - 1, 0))
    mixed = functional.conv1d(padded, weight[:, None], bias, groups=channels).transpose(1, 2)
    return (functional.silu(mixed) if activation else mixed), None
