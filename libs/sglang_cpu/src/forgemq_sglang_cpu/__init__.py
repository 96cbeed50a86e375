"""SGLang on plain PyTorch for machines without a GPU, and one SGLang server as a child process.

`server.EngineServer` starts and stops a server on any machine. SGLang itself loads `plugin` and
`platform`; on a machine with an accelerator the platform stays inactive.
"""
