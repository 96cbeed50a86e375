"""SGLang on plain PyTorch for machines without a GPU, and one SGLang server as a child process.

`server.EngineServer` starts and stops a server on either kind of machine; `plugin` and `platform`
are what SGLang itself loads, and stay inactive where there is an accelerator.
"""
