"""The device that a setting names."""

from __future__ import annotations

import torch

from flower_graph.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into a device that exists."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is none of auto, cpu, cuda, cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigError(
            f"device: {name!r} is not there; {count} GPUs found; set device=auto or device=cpu"
        )
    return device
