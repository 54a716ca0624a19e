"""Pools of threads in the place of XLA's, to which native calls give their tasks."""

import ctypes
import threading

from optzoo.native.call_frame import Api, Destroy, NumThreads, Schedule

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_CONTEXT = 0x5EED  # what the functions of XLA are to be called with
_ERROR = 0xE44


class Pool:
    """A pool that does its tasks in a way of its own.

    Args:
        how: "threads": each in a new thread, at once; "inline": before it returns; "late": when
            `finish` is called; "refused": never, with an error; "none": there is no pool.
        size: the number of threads that it states.
    """

    def __init__(self, how, size):
        self.how, self.size = how, size
        self.given = self.errors = 0
        self._tasks, self._threads = [], []
        self._kept = {
            "ThreadPool_Schedule": _FUNCTION(self._schedule),
            "ThreadPool_NumThreads": _FUNCTION(self._count),
            "Error_Destroy": _FUNCTION(self._destroy),
        }
        pointers = {
            f"XLA_FFI_{name}": ctypes.cast(function, ctypes.c_void_p)
            for name, function in self._kept.items()
        }
        self._api = Api(ctypes.sizeof(Api), **pointers)

    def fields(self):
        """Those of a call frame."""
        return {"api": ctypes.addressof(self._api), "ctx": _CONTEXT}

    def finish(self):
        """Does what is left, and waits for all threads."""
        while self._tasks:
            self._tasks.pop()()
        while self._threads:
            self._threads.pop().join()

    def _args(self, kind, place):
        args = kind.from_address(place)
        right = args.struct_size == ctypes.sizeof(kind) and not args.extension_start
        assert right and (kind is Destroy or args.ctx == _CONTEXT)
        return args

    def _schedule(self, place):
        args = self._args(Schedule, place)
        task, data = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(args.task), args.data
        if self.how == "refused":
            self.errors += 1
            return _ERROR
        self.given += 1
        run = lambda: task(data)
        if self.how == "inline":
            run()
        elif self.how == "late":
            self._tasks.append(run)
        else:
            self._threads.append(threading.Thread(target=run))
            self._threads[-1].start()

    def _count(self, place):
        args = self._args(NumThreads, place)
        if self.how == "none":
            self.errors += 1
            return _ERROR
        ctypes.c_int64.from_address(args.num_threads).value = self.size

    def _destroy(self, place):
        assert self._args(Destroy, place).error == _ERROR
        self.errors -= 1
