"""Events are counted by one thread and read by another."""

from __future__ import annotations

import sys
import threading

from piecegraph.base.events import Event, EventLog


def test_a_log_is_read_while_events_come() -> None:
    log, interval = EventLog("ignore"), sys.getswitchinterval()

    def emit() -> None:
        for number in range(3000):
            log.emit(Event("PG501", str(number), "a reason"))

    thread = threading.Thread(target=emit)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        while thread.is_alive():
            assert log.counts.get("PG501", 0) <= len(log.distinct)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert log.counts == {"PG501": 3000}
