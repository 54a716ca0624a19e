"""Runs all asks and prints what came out; with ``--store`` writes it to output.json.

``docs/differences.md`` shows it.
"""

import json
import pathlib
import runpy
import sys

FOLDER = pathlib.Path(__file__).parent
STORED = FOLDER / "output.json"
ASKS = ["float16", "injected_dtypes", "second_moment_dtype", "soap", "sharded_muon"]
ASKS += ["stacked_leaves", "nnx_partition", "state_sharding", "cookbook", "accumulation", "ftrl"]
ASKS += ["host_offload"]


def load(name):
    """The names of a script."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def entries():
    """What came out when it was stored: one entry with a heading for each ask."""
    stored = json.loads(STORED.read_text())
    lines = []
    for name in ASKS:
        ask = load(name)
        where = ", ".join(
            f"[{url.split('/')[1]} {url.split('/')[3]}](https://github.com/{url})"
            for url in ask["ASKED"]
        )
        out = stored["out"][name]
        lines += [
            f"### {ask['__doc__'].splitlines()[0].rstrip('.')}",
            "",
            f"Asked in {where}. [Script](../examples/asks/{name}.py).",
            "",
            f"- **optax:** {out['optax']}",
            f"- **optzoo:** {out['optzoo']}",
            f"- **Answered:** {ask['ANSWERED']}",
            "",
        ]
    versions = ", ".join(f"{package} {v}" for package, v in stored["versions"].items())
    return "\n".join([*lines, f"All were run with {versions}.", ""])


def main():
    """Runs and prints."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import flax
    import optax

    out = {}
    for name in ASKS:
        ask = load(name)
        out[name] = {"optax": ask["with_optax"](), "optzoo": ask["with_optzoo"]()}
        print(name, *(f"  {library}: {text}" for library, text in out[name].items()), sep="\n")
    if "--store" in sys.argv:
        versions = {m.__name__: m.__version__ for m in (jax, optax, flax)}
        STORED.write_text(json.dumps({"versions": versions, "out": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
