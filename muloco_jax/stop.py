"""Stopping a run in good order when the system or the user asks for it."""

import contextlib
import os
import signal
import threading
import time

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Those that signal a process and then its group, as `timeout` does, mean it once.
_ONE_SIGNAL_SECONDS = 0.5


class Stop:
    """While it is entered, a first SIGTERM or SIGINT asks to stop; a second kills.

    Both are noticed at once, by a thread that Python wakes up: the main thread may be
    compiling for minutes. If entered in another thread, where Python allows no
    handlers, it never asks.

    Attributes:
        asked: whether this process was asked to stop.
    """

    def __init__(self):
        self.asked = False
        self._before = {}

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {s: signal.signal(s, self._note) for s in _SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._write)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *exception):
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._watcher.join()
        os.close(self._read)

    def _note(self, number, frame):
        self.asked = True

    def _watch(self):
        first = None
        while numbers := os.read(self._read, 1):
            now = time.monotonic()
            if numbers[0] not in _SIGNALS:  # Of somebody else's handler.
                continue
            if first is not None and now - first > _ONE_SIGNAL_SECONDS:
                os._exit(128 + numbers[0])
            if first is None:
                first, self.asked = now, True
                name = signal.Signals(numbers[0]).name
                text = f"{name}: saving after this round; once more to stop at once\n"
                with contextlib.suppress(OSError):
                    os.write(1, text.encode())  # `print` may be in use.
