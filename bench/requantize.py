"""A GGUF file with its weights in another type, for engines that lack ours or do better with it.

Owns the copy: metadata and norms as they are, matrices dequantised and written as f16, bf16, q8_0
or q4_0 (there the embedding, which is the head, stays at 8 bits). What was lost stays lost, and a
q4_0 made from 4-bit weights loses more: judge it by its perplexity.

    python -m bench.requantize f16 FROM.gguf TO.gguf
"""

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def requantize(name: str, source: Path, target: Path) -> None:
    """Write the copy."""
    kind, file_type = TYPES[name]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = int(file_type) if key == "general.file_type" else field.contents()
        part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], sub_type=part)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        elif kind == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            eight = name == "q4_0" and tensor.name in (EMBEDDING, HEAD)
            to = gguf.GGMLQuantizationType.Q8_0 if eight else kind
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Write one copy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("type", choices=sorted(TYPES))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    flags = parser.parse_args()
    requantize(flags.type, flags.source, flags.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
