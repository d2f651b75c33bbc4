"""What a test's log holds of errors."""

import pytest


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of errors, but for those that gRPC's poller has for the closed event loop of a test before."""
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    return [
        record.getMessage()
        for record in errors
        if not (record.exc_info and "loop is closed" in str(record.exc_info[1]))
    ]
