"""Lowers optimizers: ``python -m tests.interop.sparsecore.make_stablehlo``.

Needs Python 3.12 or later with jax-tpu-embedding 0.2.0. Writes ``stablehlo.json.xz``: for each
golden record in float32 whose gradients are rows, and whose optimizer updates each row by itself,
the StableHLO by the width of the table; and the versions.
"""

import json
import lzma

import jax
from jax_tpu_embedding.sparsecore import version

import optzoo
from tests import golden

from . import lowered


def main():
    stored = {"versions": {"jax": jax.__version__, "jax-tpu-embedding": version.__version__}}
    for name, record in lowered.records().items():
        if record.meta["optimizer"] in lowered.REFUSED:
            continue
        spec = optzoo.interop.sparsecore.sparsecore(golden.build(record.meta))
        widths = {start[0].size for start in record.group("init").values()}
        stored[name] = {str(width): lowered.lower(spec, width) for width in sorted(widths)}
    lowered.STORED.write_bytes(lzma.compress(json.dumps(stored).encode(), preset=9))


if __name__ == "__main__":
    main()
