"""A WAV file -> log-mel frames (16 kHz, 25 ms windows every 10 ms), in the format of Whisper and Qwen2.5-Omni."""

from __future__ import annotations

import wave
from functools import lru_cache
from pathlib import Path

import numpy
import torch

from mindspeed_autoparallel.errors import ConfigError

RATE_HZ = 16000
_WINDOW, _HOP = 400, 160


def load_audio(path: Path, num_mel_bins: int) -> torch.Tensor:
    """Return ``[mel bins, frames]``; mono or stereo PCM of 8, 16 or 32 bits at any rate."""
    try:
        with wave.open(str(path), "rb") as opened:
            rate, channels, width = opened.getframerate(), opened.getnchannels(), opened.getsampwidth()
            raw = opened.readframes(opened.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(f"cannot read the audio {path}: {error}.") from error
    kinds = {1: numpy.uint8, 2: numpy.int16, 4: numpy.int32}
    if width not in kinds:
        raise ConfigError(f"the audio {path} has {8 * width} bits per sample; 8, 16 and 32 are supported.")
    samples = numpy.frombuffer(raw, dtype=kinds[width]).astype(numpy.float32).reshape(-1, channels).mean(axis=1)
    samples = (samples - 128) / 128 if width == 1 else samples / float(2 ** (8 * width - 1))
    if rate != RATE_HZ:
        times = numpy.arange(int(len(samples) * RATE_HZ / rate)) * (rate / RATE_HZ)
        samples = numpy.interp(times, numpy.arange(len(samples)), samples).astype(numpy.float32)
    if len(samples) < 4 * _HOP:
        raise ConfigError(f"the audio {path} lasts {1000 * len(samples) / RATE_HZ:.0f} ms; at least 40 ms are needed.")
    return log_mel(torch.from_numpy(samples), num_mel_bins)


def log_mel(samples: torch.Tensor, num_mel_bins: int) -> torch.Tensor:
    """Transform ``samples`` at 16 kHz to ``[mel bins, frames]``, clipped to 80 dB below the loudest and scaled to about
    -1..1."""
    spectrum = torch.stft(samples, _WINDOW, _HOP, window=torch.hann_window(_WINDOW), return_complex=True)
    power = spectrum[:, :-1].abs() ** 2
    loudness = (_mel_filters(num_mel_bins) @ power).clamp(min=1e-10).log10()
    return (torch.maximum(loudness, loudness.max() - 8.0) + 4.0) / 4.0


@lru_cache(maxsize=2)
def _mel_filters(num_mel_bins: int) -> torch.Tensor:
    """Return triangles on Slaney's mel scale (linear below 1 kHz, logarithmic above), of equal area."""
    linear_hz, step = 1000.0, numpy.log(6.4) / 27.0
    top = 15.0 + numpy.log(RATE_HZ / 2 / linear_hz) / step
    mels = numpy.linspace(0.0, top, num_mel_bins + 2)
    edges = numpy.where(mels < 15.0, mels * 200.0 / 3.0, linear_hz * numpy.exp(step * (mels - 15.0)))
    bins = numpy.linspace(0.0, RATE_HZ / 2, _WINDOW // 2 + 1)
    rising = (bins[None, :] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins[None, :]) / (edges[2:] - edges[1:-1])[:, None]
    triangles = numpy.clip(numpy.minimum(rising, falling), 0.0, None) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(triangles.astype(numpy.float32))
