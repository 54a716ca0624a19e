"""Checkpoints of TensorFlow 1 as mappings from names to arrays."""

import contextlib
import importlib
import os
import pathlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]


def read(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """All variables of a checkpoint: of a mapping, an ``.npz`` file, or TensorFlow's prefix.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ImportError: if it takes TensorFlow to read it, and that is not installed.
        ValueError: if a file is incomplete or damaged.
    """
    if isinstance(checkpoint, Mapping):
        return {str(name): np.asarray(value) for name, value in checkpoint.items()}
    path = os.fspath(checkpoint)
    return _read_npz(path) if path.endswith(".npz") else _read_prefix(path)


def write(path: str | os.PathLike[str], variables: Mapping[str, np.ndarray]) -> None:
    """Writes an ``.npz`` file if ``path`` ends so, otherwise TensorFlow's files of that prefix.

    Raises:
        ImportError: if it takes TensorFlow to write it, and that is not installed.
        TypeError: if ``.npz`` cannot hold a dtype.
    """
    path = os.fspath(path)
    if not path.endswith(".npz"):
        _write_prefix(os.path.abspath(path), variables)
        return
    for name, value in variables.items():
        if value.dtype.kind == "V":
            raise TypeError(
                f"an .npz file cannot hold {name} of dtype {value.dtype}: "
                "let path be the prefix of a checkpoint of TensorFlow's, without .npz"
            )
    folder, file = os.path.split(os.path.abspath(path))
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        # np.savez cannot have an array called "file".
        with zipfile.ZipFile(whole := os.path.join(beside, file), "w") as archive:
            for name, value in variables.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, value, allow_pickle=False)
        os.replace(whole, path)


def import_tensorflow() -> Any:
    """TensorFlow, version 2.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            "TensorFlow reads and writes its checkpoints: pip install 'optzoo[tf1]', "
            "or pip install tensorflow-cpu; .npz files and mappings need none"
        ) from error


def _write_prefix(prefix: str, variables: Mapping[str, np.ndarray]) -> None:
    tf = import_tensorflow()
    v1 = tf.compat.v1
    # In a graph, since eager execution may be off where this runs beside code of TensorFlow 1.
    with tf.Graph().as_default(), tf.device("/cpu:0"), v1.Session() as session:
        inputs = {v1.placeholder(value.dtype, value.shape): value for value in variables.values()}
        save = tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(variables),
            shape_and_slices=[""] * len(variables),
            tensors=list(inputs),
        )
        session.run(save, inputs)


def _read_npz(path: str) -> dict[str, np.ndarray]:
    errors = OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error
    with (
        _naming(path, *errors),
        open(path, "rb") as stream,
        np.load(stream, allow_pickle=False) as file,
    ):
        # A damaged header may ask for fewer bytes than there are, which skips the checksum; a
        # damaged list of members may lack some, but their number is stored after it.
        if (bad := file.zip.testzip()) is not None:
            raise ValueError(f"the checksum of {bad!r} is wrong")
        stream.seek(-12, os.SEEK_END)
        number = int.from_bytes(stream.read(2), "little")
        if not file.zip.comment and number != min(len(file.zip.namelist()), 0xFFFF):
            raise ValueError("it lacks members")
        return {name: file[name] for name in file.files}


def _read_prefix(path: str) -> dict[str, np.ndarray]:
    file = pathlib.Path(path)
    if not file.exists() and not file.with_name(f"{file.name}.index").exists():
        raise FileNotFoundError(
            f"no checkpoint {path!r}: give its prefix, such as 'model.ckpt-1000' for "
            "model.ckpt-1000.index and model.ckpt-1000.data-00000-of-00001"
        )
    tf = import_tensorflow()
    # The reader turns some of TensorFlow's errors into Python's.
    errors = tf.errors.OpError, IndexError, OSError, RuntimeError, TypeError, ValueError
    with _naming(path, *errors):
        reader = tf.train.load_checkpoint(path)
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_dtype_map()}


@contextlib.contextmanager
def _naming(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Errors of a reader, which do not all name the file, as a ``ValueError`` that does."""
    try:
        yield
    except FileNotFoundError:
        raise
    except errors as error:
        raise ValueError(
            f"cannot read the checkpoint {path!r}, which is incomplete or damaged: {error}"
        ) from error
