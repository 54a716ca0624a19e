"""Reads and writes checkpoints of TensorFlow 1 as mappings from names to arrays."""

import contextlib
import glob
import importlib
import itertools
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.extras import how_to_install
from ...core.locks import locked
from . import table
from .parts import Parts, Slice, Stored, put_together

_DATA = ".data-00000-of-00001"
_OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"  # a name in all files of tf.train.Checkpoint
_UNREAD = (
    "optzoo_unfinished_save"  # in an index while it is replaced, or if the process is then killed
)
_PART = re.compile(r"(.+)\.(?:index|meta|data-\d{5}-of-\d{5})", re.DOTALL)

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]


def read(checkpoint: Checkpoint) -> dict[str, Stored]:
    """All variables of a checkpoint: a mapping, an ``.npz`` file, or TensorFlow's prefix or folder.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ImportError: if reading needs TensorFlow, and it is not installed.
        ValueError: if a file is incomplete or damaged, or only a part of a checkpoint, or if
            ``tf.train.Checkpoint`` wrote it.
    """
    if isinstance(checkpoint, Mapping):
        _refuse_objects("the checkpoint", checkpoint)
        return {str(name): np.asarray(value) for name, value in checkpoint.items()}
    path = os.fspath(checkpoint)
    return dict(_read_npz(path)) if path.endswith(".npz") else _read_prefix(path)


def _refuse_objects(checkpoint: str, names: Collection[str]) -> None:
    if _OBJECTS in names:
        raise ValueError(
            f"{checkpoint} was written by tf.train.Checkpoint or Keras, which name variables by "
            "paths of Python objects, 'layer/kernel/.ATTRIBUTES/VARIABLE_VALUE': restore it in "
            "TensorFlow and save it with tf.compat.v1.train.Saver, or give a dict of arrays by "
            "the names of TensorFlow 1"
        )


def write(path: str | os.PathLike[str], variables: Mapping[str, Stored]) -> None:
    """Writes an ``.npz`` file if ``path`` ends in ``.npz``, otherwise TensorFlow's files.

    If the process is killed at any time, the old or the new checkpoint is readable by this library
    and by TensorFlow. The next save to the same path removes temporary files of a killed process.

    Raises:
        ImportError: if writing needs TensorFlow, and it is not installed.
        OSError: if the files cannot be written.
        TypeError: if ``.npz`` does not support a dtype, or ``path`` is not a path.
        ValueError: if ``path`` is empty or a folder, if TensorFlow's files do not support a name,
            or ``.npz`` does not support a part of a variable.
    """
    target = _target(path)
    write_files = _write_npz if target.endswith(".npz") else _write_prefix
    folder, file = os.path.split(target)
    hidden = os.path.join(folder, f".{file}")
    try:
        os.makedirs(folder, exist_ok=True)
        with locked(f"{hidden}.lock"), _scratch(f"{hidden}.saving") as beside:
            write_files(target, beside, variables)
    except OSError as error:
        raise type(error)(f"path: cannot write the checkpoint {target!r}: {error}") from error


def import_tensorflow() -> Any:
    """TensorFlow, version 2.

    Raises:
        ImportError: if TensorFlow is not installed.
    """
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(
            f"TensorFlow is needed to read and write its checkpoints: {how_to_install('tf1')}; "
            ".npz files and mappings do not need it"
        ) from error


def _target(path: Any) -> str:
    """The absolute path to write to."""
    given = os.fspath(path)
    if not isinstance(given, str):
        raise TypeError(f"path must be a string or a path, got {path!r}")
    if not os.path.basename(given) or os.path.isdir(given):
        raise ValueError(
            f"path is {given!r}, which is {'a folder' if given else 'empty'}: give the prefix of a "
            "checkpoint, such as 'folder/model.ckpt-1000', or a file that ends in .npz"
        )
    return os.path.abspath(given)


@contextlib.contextmanager
def _scratch(folder: str) -> Iterator[str]:
    """A temporary empty folder; files that a killed process left in it are removed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_npz(target: str, beside: str, variables: Mapping[str, Stored]) -> None:
    prefix = "give the prefix of a TensorFlow checkpoint, without .npz, as path"
    arrays = dict[str, np.ndarray]()
    for name, value in variables.items():
        if isinstance(value, Parts) and not value.is_complete:
            raise ValueError(f"an .npz file cannot store {name}, a part of a variable: {prefix}")
        array = put_together(value) if isinstance(value, Parts) else value
        if array.dtype.kind == "V":
            raise TypeError(f"an .npz file cannot store {name} of dtype {array.dtype}: {prefix}")
        arrays[name] = array
    # np.savez cannot have an array called "file".
    with zipfile.ZipFile(whole := os.path.join(beside, "npz"), "w") as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, value, allow_pickle=False)
    os.replace(whole, target)


def _write_prefix(target: str, beside: str, variables: Mapping[str, Stored]) -> None:
    """Replaces an index and its data, such that the index has the right data at any time.

    Two files cannot be renamed atomically. But the names of the data files contain their number,
    which is also stored in the index. The new data are written beside the old under another number,
    and renaming an index for them is the atomic change; the same is then done again to return to
    the usual name.
    """
    if "" in variables:  # at which TensorFlow would end the process
        raise ValueError(
            "names: TensorFlow needs a name for the array with the empty path: give one by the "
            "argument names"
        )
    new, index = os.path.join(beside, "new"), f"{target}.index"
    _save_v2(new, variables)
    if not os.path.exists(index):
        os.replace(f"{new}{_DATA}", target + _DATA)
        os.replace(f"{new}.index", index)
        return
    shutil.copyfile(f"{new}.index", final := os.path.join(beside, "final"))
    number = next(n for n in itertools.count(2) if not _data_files(target, n))
    merged = _with_data_files(new, beside, number)
    for file in _data_files(merged):
        os.replace(file, target + file.removeprefix(merged))
    os.replace(f"{merged}.index", index)
    data, again = f"{target}.data-00000-of-{number:05}", os.path.join(beside, "data")
    try:
        os.link(data, again)
    except OSError:  # not every file system has hard links
        shutil.copyfile(data, again)
    os.replace(again, target + _DATA)
    os.replace(final, index)
    for file in _data_files(target):
        if file != target + _DATA:
            os.remove(file)


def _data_files(prefix: str, number: int | None = None) -> list[str]:
    """The data files of a prefix, or of its checkpoint in this number of files."""
    total = "[0-9]" * 5 if number is None else f"{number:05}"
    return glob.glob(f"{glob.escape(prefix)}.data-{'[0-9]' * 5}-of-{total}")


def _with_data_files(prefix: str, beside: str, number: int) -> str:
    """The prefix of the same checkpoint in this number of data files.

    The data are in the first file; each other file has a variable that is not read.
    """
    others = [os.path.join(beside, f"other{i}") for i in range(1, number)]
    for i, other in enumerate(others):
        _save_v2(other, {f"{_UNREAD}_{i}": np.zeros((), np.float32)})
    merged = os.path.join(beside, "merged")
    _run_op(
        "MergeV2Checkpoints",
        (),
        checkpoint_prefixes=[prefix, *others],
        destination_prefix=merged,
        delete_old_dirs=False,
    )
    return merged


def _save_v2(prefix: str, variables: Mapping[str, Stored]) -> None:
    names, slices, tensors = list[str](), list[str](), list[np.ndarray]()
    for name, stored in variables.items():
        pieces = stored.values if isinstance(stored, Parts) else {None: stored}
        for part, value in pieces.items():
            names.append(name)
            slices.append("" if part is None else _spec(stored.shape, part))
            tensors.append(value)
    _run_op("SaveV2", tensors, prefix=prefix, tensor_names=names, shape_and_slices=slices)


def _spec(shape: tuple[int, ...], part: Slice) -> str:
    """The description of a slice for TensorFlow's operations."""
    return f"{' '.join(map(str, shape))} {':'.join(f'{start},{length}' for start, length in part)}"


def _run_op(name: str, tensors: Sequence[np.ndarray], **arguments: Any) -> Any:
    """Runs a TensorFlow operation on files; ``tensors`` are its inputs, if any."""
    tf = import_tensorflow()
    v1 = tf.compat.v1
    # In a graph, since eager execution may be off where this runs beside code of TensorFlow 1.
    with tf.Graph().as_default(), tf.device("/cpu:0"), v1.Session() as session:
        inputs = [v1.placeholder(value.dtype, value.shape) for value in tensors]
        if inputs:
            arguments["tensors"] = inputs
        try:
            feeds = dict(zip(inputs, tensors, strict=True))
            return session.run(getattr(tf.raw_ops, name)(**arguments), feeds)
        except tf.errors.OpError as error:
            raise OSError(error.message) from error


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


def _read_prefix(path: str) -> dict[str, Stored]:
    if os.path.isdir(path):
        folder, path = path, import_tensorflow().train.latest_checkpoint(path)
        if path is None:
            raise FileNotFoundError(
                f"no checkpoint in the folder {folder!r}: its file 'checkpoint' names the latest "
                "one; give the prefix of one, such as 'model.ckpt-1000'"
            )
    index = f"{path}.index"
    tables = [file for file in (index, path) if os.path.exists(file)][:1] or glob.glob(path)
    if index not in tables and (part := _PART.fullmatch(path)):
        raise ValueError(f"{path!r} is one file of a checkpoint: give its prefix, {part[1]!r}")
    if not tables:
        raise FileNotFoundError(
            f"no checkpoint {path!r}: give its prefix, such as 'model.ckpt-1000' for "
            "model.ckpt-1000.index and model.ckpt-1000.data-00000-of-00001"
        )
    tf = import_tensorflow()
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    # The reader converts some of TensorFlow's errors to Python's.
    errors = tf.errors.OpError, IndexError, OSError, RuntimeError, TypeError, ValueError
    while True:
        before = _identity(index)
        try:
            with _naming(path, *errors, decode_error):
                reader = tf.train.load_checkpoint(path)
                dtypes = reader.get_variable_to_dtype_map()
            _refuse_objects(repr(path), dtypes)
            with _naming(path, *errors, decode_error):
                in_parts = _find_slices(tables)
                names = {n for n in dtypes if n not in in_parts and not n.startswith(_UNREAD)}
                whole = {name: np.asarray(reader.get_tensor(name)) for name in names}
                parts = _read_parts(path, in_parts, dtypes)
            if not in_parts or _identity(index) == before:  # all files are from one save
                return whole | parts
        except ValueError:
            if _identity(index) == before:
                raise  # otherwise another process has just replaced the files


def _find_slices(tables: Iterable[str]) -> dict[str, tuple[tuple[int, ...], set[Slice]]]:
    """The shapes and slices of the variables that are stored in parts."""
    bundle = importlib.import_module("tensorflow.core.protobuf.tensor_bundle_pb2")
    saved = importlib.import_module("tensorflow.core.util.saved_tensor_slice_pb2")
    found = dict[str, tuple[tuple[int, ...], set[Slice]]]()

    def add(name, shape, slices):
        sizes = tuple(dim.size for dim in shape.dim)
        whole = tuple((0, size) for size in sizes)
        for part in slices:
            extents = zip(part.extent, sizes, strict=True)
            # An extent without a length is the whole axis.
            here = tuple((e.start, e.length if e.HasField("length") else n) for e, n in extents)
            if here != whole:
                found.setdefault(name, (sizes, set()))[1].add(here)

    for file in tables:
        of_file = table.entries(file)
        first = next(of_file)
        if file.endswith(".index"):
            for key, value in of_file:
                entry = bundle.BundleEntryProto.FromString(value)
                add(key.decode(errors="replace"), entry.shape, entry.slices)
        else:  # the V1 format: the first value has them all, the others are the arrays
            for variable in saved.SavedTensorSlices.FromString(first[1]).meta.tensor:
                add(variable.name, variable.shape, variable.slice)
    return found


def _read_parts(
    path: str,
    in_parts: Mapping[str, tuple[tuple[int, ...], set[Slice]]],
    dtypes: Mapping[str, Any],
) -> dict[str, Parts]:
    pieces = [
        (n, shape, part) for n, (shape, slices) in in_parts.items() for part in sorted(slices)
    ]
    values = (
        _run_op(
            "RestoreV2",
            (),
            prefix=path,
            tensor_names=[name for name, _, _ in pieces],
            shape_and_slices=[_spec(shape, part) for _, shape, part in pieces],
            dtypes=[dtypes[name] for name, _, _ in pieces],
        )
        if pieces
        else []
    )
    found = {name: Parts(shape, {}) for name, (shape, _) in in_parts.items()}
    for (name, _, part), value in zip(pieces, values, strict=True):
        found[name].values[part] = value
    return found


def _identity(file: str) -> tuple[int, int] | None:
    """A value that changes when the file is replaced."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


@contextlib.contextmanager
def _naming(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Converts errors of a reader to a ``ValueError`` that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except errors as error:
        raise ValueError(
            f"cannot read the checkpoint {path!r}, which is incomplete or damaged: {error}"
        ) from error
