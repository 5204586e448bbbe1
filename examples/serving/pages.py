"""Pages: which pages of a cache are free, who uses the others, and what they hold.

Keys and values of a token depend on the token and on all before it. So a page that was filled once
serves every sequence that begins with the same tokens: the pages of a common prefix are found here
instead of being computed again. A page that nobody uses keeps what it holds until it is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

#: What a page holds: the number of the page's text before it, and its own tokens.
Content = tuple[int, tuple[int, ...]]

#: The number of the text before the first page.
NOTHING = 0


class Pages:
    """A fixed number of pages with reference counts.

    Attributes:
        size: the keys of a page.
        users: of each page, the number of sequences that use it.
        free: the pages that nobody uses, the one that was given back first in front.
        keep: whether pages remember their tokens; otherwise none is ever shared.
    """

    def __init__(self, number: int, size: int, *, keep: bool = True):
        self.size, self.keep = size, keep
        self.users = [0] * number
        self.free: dict[int, None] = dict.fromkeys(range(number))
        # A text is all tokens up to the end of a page. Its number is never used again.
        self._page_of: dict[Content, int] = {}
        self._content_of: dict[int, Content] = {}
        self._text_of: dict[int, int] = {}
        self._texts = count(NOTHING + 1)

    def take(self) -> int:
        """A free page for one sequence; it forgets what it held."""
        page = next(iter(self.free)) if self.keep else min(self.free)
        self._forget(page)
        self._use(page)
        return page

    def give_back(self, pages: Iterable[int]) -> None:
        """Ends one sequence's use of some pages."""
        for page in pages:
            if self.users[page] == 0:
                raise ValueError(f"page {page} is given back by nobody who has it")
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free[page] = None

    def share(self, tokens: Sequence[int]) -> list[int]:
        """The pages that hold the beginning of a text, with one more user each.

        The last token is never among them: somebody has to compute what follows it.
        """
        pages, text = [], NOTHING
        for end in range(self.size, len(tokens), self.size):
            page = self._page_of.get((text, tuple(tokens[end - self.size : end])))
            if page is None:
                break
            self._use(page)
            pages.append(page)
            text = self._text_of[page]
        return pages

    def fill(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Notes which tokens the pages of a sequence hold; a page that is not full holds none."""
        text = NOTHING
        for number in range(len(tokens) // self.size if self.keep else 0):
            page = pages[number]
            if page not in self._text_of:
                content = text, tuple(tokens[number * self.size : (number + 1) * self.size])
                # If another page has it already, this one stays the sequence's own.
                page = self._page_of.setdefault(content, page)
                if page not in self._text_of:
                    self._content_of[page], self._text_of[page] = content, next(self._texts)
            text = self._text_of[page]

    def _use(self, page: int) -> None:
        self.users[page] += 1
        self.free.pop(page, None)

    def _forget(self, page: int) -> None:
        if page in self._content_of:
            del self._page_of[self._content_of.pop(page)], self._text_of[page]
