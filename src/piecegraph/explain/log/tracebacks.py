"""What one process told: its exceptions in order. Read directly from chunks that stand in order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from piecegraph.explain.log.parts import Chunk

Link = Literal["", "cause", "context"]


@dataclass(frozen=True, slots=True)
class Act:
    """One exception with its frames."""

    frames: tuple[Chunk, ...]
    text: Chunk | None
    """None where the log ends inside of it, or where the frames belong to no exception."""
    link: Link = ""
    header: Chunk | None = None

    @property
    def is_call_chain(self) -> bool:
        return self.text is None and self.header is None

    @property
    def end(self) -> int:
        """The line at which it is complete."""
        last = self.text or (self.frames[-1] if self.frames else self.header)
        return last.end if last is not None else 0


Story = tuple[Act, ...]


def key_of(story: Story) -> Hashable:
    """Equal for processes that tell the same."""
    return tuple(
        (act.link, tuple(frame.key for frame in act.frames), act.text.key if act.text else None) for act in story
    )


def num_tellers(chunks: Sequence[Chunk]) -> int:
    """How many processes must have written these: each begins with a header that follows no link."""
    headers = sum(chunk.kind == "header" for chunk in chunks)
    return max(1, headers - sum(chunk.kind == "link" for chunk in chunks))


def read_in_order(chunks: Sequence[Chunk]) -> list[Story] | None:
    """The stories, if each is told to its end before the next begins; None if they are interleaved."""
    reader = _Reader()
    return reader.finish() if all(map(reader.take, chunks)) else None


@dataclass(slots=True)
class _Reader:
    """Follows ``(header frame* text (link header frame* text)*)*``, with headless call chains in between."""

    stories: list[Story] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    header: Chunk | None = None
    frames: list[Chunk] = field(default_factory=list)
    link: Link = ""

    def take(self, chunk: Chunk) -> bool:
        """Read on; False if the chunk does not fit."""
        is_inside = self.header is not None or bool(self.frames)
        if chunk.kind == "frame":
            if not is_inside and not self.link:
                self._close_story()
            self.frames.append(chunk)
        elif chunk.kind == "text":
            self._close_act(chunk)
        elif chunk.kind == "link":
            if is_inside or self.link or not self.acts:
                return False
            self.link = "cause" if chunk.text == "cause" else "context"
        elif self.header is not None:
            return False
        else:
            if not self.link:
                self._close_story()
            self.header = chunk
        return True

    def finish(self) -> list[Story]:
        self._close_story()
        return self.stories

    def _close_act(self, text: Chunk | None) -> None:
        if not self.link and self.acts:
            self.stories.append(tuple(self.acts))
            self.acts = []
        self.acts.append(Act(tuple(self.frames), text, self.link, self.header))
        self.header, self.frames, self.link = None, [], ""

    def _close_story(self) -> None:
        if self.header is not None or self.frames:
            self._close_act(None)
        if self.acts:
            self.stories.append(tuple(self.acts))
        self.acts, self.link = [], ""
