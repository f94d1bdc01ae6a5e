# SPDX-License-Identifier: Apache-2.0
"""Values of any length in the system metadata of an instance, which Nova leaves alone there."""

from __future__ import annotations

from collections.abc import MutableMapping
import json
from typing import Any

_SIZE = 255  # characters that one of Nova's values has at most


def put(metadata: MutableMapping[str, str], prefix: str, value: Any) -> None:
    """:param value: anything that JSON can hold"""
    remove(metadata, prefix)
    text = json.dumps(value, separators=(',', ':'))
    metadata.update(
        {
            f'{prefix}{number}': text[start : start + _SIZE]
            for number, start in enumerate(range(0, len(text), _SIZE))
        }
    )


def get(metadata: MutableMapping[str, str], prefix: str) -> Any:
    """None if there is none."""
    numbers = sorted(int(key.removeprefix(prefix)) for key in metadata if key.startswith(prefix))
    return (
        json.loads(''.join(metadata[f'{prefix}{number}'] for number in numbers))
        if numbers
        else None
    )


def remove(metadata: MutableMapping[str, str], prefix: str) -> bool:
    """Whether there was one."""
    keys = [key for key in metadata if key.startswith(prefix)]
    for key in keys:
        del metadata[key]
    return bool(keys)
