"""Does it work on code that nobody wrote for it? Modules of public projects, each beside its rewrite.

The corpus is the folder ``generated`` of `jansel/pytorch-jit-paritybench
<https://github.com/jansel/pytorch-jit-paritybench>`_: one file for each of 2,000 projects on GitHub, with the modules
of the project and arguments that they take. It is not part of this repository.
"""
