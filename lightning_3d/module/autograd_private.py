import torch


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
