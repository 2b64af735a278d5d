"""What all senders have that compare whole tensors: the base classes of the public ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from delta_sender.publish.notify import Told
from delta_sender.publish.publisher import Publisher

if TYPE_CHECKING:
    from typing_extensions import Self


class Sender:
    """A context manager that closes its publisher, which subclasses make."""

    _publisher: Publisher

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def run(self) -> str:
        """The run that the sender has opened, or opened again: an id of its lineage of weights."""
        return self._publisher.run.name

    @property
    def epoch(self) -> int:
        """Which opening of the run this sender is, from 1."""
        return self._publisher.run.epoch

    def close(self) -> None:
        """Release the engines or the log, and close own HTTP clients and the state file.

        Engines that lag are waited for, `lag_limit` seconds each at most; answers of those that
        follow a log are not. Engines drop what they have staged of this sender. Then other runs can
        claim them, and another sender can write into the log.

        Leaving a `with` block does this, by Ctrl-C or an exception, too; and so does the
        interpreter when it ends. A sender that is killed cannot: its run owns the engines until
        another takes them over.
        """
        self._publisher.close()


class SingleSender(Sender):
    """A sender to one engine, or into one log."""

    @property
    def version(self) -> int:
        """The version that the engine acknowledged last, or the log's newest one."""
        return self._publisher.sessions[0].state.version

    @property
    def told(self) -> Mapping[str, Told]:
        """By url of `notify`: the version that the engine was at after its last look, or an error.

        Engines that have not answered yet are left out.
        """
        notifier = self._publisher.notifier
        return {} if notifier is None else notifier.told

    def wait(self, timeout: float | None = None) -> Mapping[str, Told]:
        """Wait until every engine of `notify` has answered, or some seconds; return `told`."""
        notifier = self._publisher.notifier
        return {} if notifier is None else notifier.wait(timeout)
