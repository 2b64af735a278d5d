"""A whole part in hex, with its digest and signature, to test another encoder against."""

import json

import numpy as np

from engine_ext.format import Limits, ParamDelta, encode_part, read_container, sign, tensor_digest

_INDICES = np.array([1, 2, 6])
_OLD = np.array([0x3F00, 0x3F81, 0x0000], np.uint16)
_NEW = np.array([0x3F80, 0x7FC1, 0x8000], np.uint16)
_KEY = "secret"


def markdown() -> str:
    """Return the part's meaning, its header, its bytes, and what is computed over them."""
    delta = ParamDelta("w", "bfloat16", (2, 4), _INDICES, _NEW)
    old, new = (tensor_digest("w", bits, _INDICES) for bits in (_OLD, _NEW))
    digest = (new - old).hex()
    body = encode_part(
        [delta], encoding="deltas", current_version=8, sync_id="example", digest_part=digest
    )
    header, _, _ = read_container(body, Limits())
    metadata = {**header.metadata, "params": json.loads(header.metadata["params"])}
    return f"""\
Tensor `w`, bf16 of shape [2, 4]; positions {", ".join(map(str, _INDICES))}; \
old values {_hex(_OLD)}, new values {_hex(_NEW)}.

| | |
| --- | --- |
| digest of the old values | `{old.hex()}` |
| digest of the new values | `{new.hex()}` |
| signature with the key `{_KEY}` | `{sign(_KEY, body)}` |

Metadata, `params` decoded; the part has {len(body)} bytes:

```json
{json.dumps(metadata, indent=2)}
```

```
{_dump(body)}
```"""


def _hex(bits: np.ndarray) -> str:
    return " ".join(f"{value:04x}" for value in bits.tolist())


def _dump(body: bytes) -> str:
    lines = []
    for start in range(0, len(body), 16):
        row = body[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:04x}  {row.hex(' '):47}  {text}")
    return "\n".join(lines)
