"""The engine adapters: the only modules that know an engine.

`vllm` and `sglang` put the flags, the endpoints and the receiver into an engine, through its plugin
entry points or its patched source. Each imports its engine inside of functions, so that this
package can be imported without one.

Imports: every room but `engine_ext.cli`, and `delta_server`.
"""

__all__: list[str] = []
