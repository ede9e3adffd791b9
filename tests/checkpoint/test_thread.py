"""What comes after a save in the background happens only if that succeeded, however the two meet."""

from datetime import timedelta
from threading import Event

import pytest

from lightning_3d.checkpoint.keeper import Background


@pytest.mark.parametrize("asked", ["while it runs", "when it is over"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_after_waits_for_success(asked, fails):
    background, go_on, done = Background(), Event(), []

    def work(group):
        assert go_on.wait(10)
        assert group is None
        if fails:
            raise ValueError("full")

    background.start(work, timedelta(seconds=10))
    if asked == "while it runs":
        background.afterwards(lambda: done.append("removed"))
        assert done == []
        go_on.set()
    else:
        go_on.set()
        background._thread.join(10)  # over, but what went wrong was not told yet
        background.afterwards(lambda: done.append("removed"))
    if fails:
        with pytest.raises(ValueError, match="full"):
            background.wait()
    else:
        background.wait()
    assert done == ([] if fails else ["removed"])
    background.wait()  # told once
