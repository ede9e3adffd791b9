"""Code of a module that changes what `load_state_dict` gives its parameters."""

from torch import nn

_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def loads_as_torch(module: nn.Module) -> bool:
    """Return True where no code of the user is called when `module` and its children load a state."""
    own = type(module).load_state_dict is not nn.Module.load_state_dict
    return not own and not any(vars(each).get(hooks) for each in module.modules() for hooks in _HOOKS)


def copies_parameters(owner: nn.Module) -> bool:
    """Return True where `owner` copies a state to its own parameters as it is."""
    return type(owner)._load_from_state_dict is nn.Module._load_from_state_dict
