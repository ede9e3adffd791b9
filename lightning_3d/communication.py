"""temporary native stand-in"""

import torch.distributed as dist


class Replicas:
    def __init__(self, parameters, group):
        self.parameters, self.group, self.held = parameters, group, False

    def hold(self, held):
        self.held = held

    def finish(self):
        if not self.held:
            self.reduce()

    def reduce(self):
        for p in self.parameters:
            if p.grad is not None:
                dist.all_reduce(p.grad, group=self.group)
                p.grad.div_(self.group.size())

    def remove(self):
        pass


class Communication:
    def __init__(self, mesh, grad_sync, grad_compression):
        self.mesh = mesh

    def replicas(self, parameters):
        return Replicas(parameters, self.mesh.get_group("data_parallel"))

    def attach(self, module):
        return lambda: None

    def close(self):
        pass
