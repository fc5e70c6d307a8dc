"""What torch's compiler warns of by itself, which tests that treat warnings as errors leave out."""

import warnings


def ignore_compiler_warnings():
    """Ignore the warnings of torch's own code, in this process."""
    # When it is first imported, when it looks at a block's inputs, and when it traces a function of autograd.
    warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
    # Of Python 3.13.0 alone.
    warnings.filterwarnings("ignore", message="Guards may run slower on Python", category=RuntimeWarning)
