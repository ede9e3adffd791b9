"""An engine that is late: whoever does not wait for a job reads what it has not written yet."""

import time

from lightning_3d.comm.background_queue import BackgroundQueue


class SlowEngine(BackgroundQueue):
    def submit(self, job, *name):
        def late():
            time.sleep(0.003)
            return job()

        return super().submit(late, *name)
