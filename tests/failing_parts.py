"""Parts of a measurement, some of which fail: for a process of its own."""

import os
import time
from multiprocessing.connection import Connection

COUNT = 7


def measure(first: int, results: Connection) -> None:
    for part in range(first, COUNT):
        if part == 1:
            os.abort()
        if part == 3:
            results.send("RuntimeError: broken")
            os._exit(0)
        if part == 4:
            time.sleep(600)
        if part == 6:
            return
        results.send((part, 1.0, 0.0))
