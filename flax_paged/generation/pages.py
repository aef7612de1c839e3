"""`PagePool`: which pages of the KV cache are free, shared or cached. Pure Python; the arrays live elsewhere."""

import collections
from collections.abc import Hashable, Iterator, Sequence


class PrefixNode:
    """A full page whose contents are known, as a node of the prefix tree.

    The path from the root spells the tokens up to and including the page: `children` is keyed by the token ids of the
    next page (below the root, by salt and token ids), so two prefixes match exactly when they are equal, whatever
    their hashes.
    """

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, parent: "PrefixNode | None" = None, key: Hashable = None, page: int | None = None):
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[Hashable, PrefixNode] = {}


class PagePool:
    """Pages with reference counts, a prefix tree over the full ones, and least-recently-used eviction.

    A page is *live* while a sequence holds it. A page nobody holds is *cached* if the prefix tree knows its contents,
    and *free* otherwise. `allocate` takes free pages first, then evicts cached ones, the longest unused first. A page
    may be written only while one sequence holds it and the tree does not know it; `make_writable` sees to that.

    Args:
        num_pages: Pages in the pool.
        page_size: Tokens in a page.
        prefix_caching: Keep the contents of full pages for later requests with the same prefix.

    Raises:
        ValueError: A count is below 1.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True):
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"PagePool({name}={value}): expected at least 1.")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._num_users = [0] * num_pages
        self._nodes: list[PrefixNode | None] = [None] * num_pages
        self._free = collections.deque(range(num_pages))
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first
        self.root = PrefixNode()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds but whose contents may be reused."""
        return len(self._cached)

    @property
    def num_live(self) -> int:
        """Pages held by at least one sequence."""
        return self.num_pages - self.num_available

    def num_users(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._num_users[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """Hand out a page with one user, evicting the least recently used cached page if none is free.

        Raises:
            RuntimeError: Every page is live. Check `num_available` first.
        """
        if self._free:
            page = self._free.popleft()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._forget(self._nodes[page])
        else:
            raise RuntimeError(f"All {self.num_pages} pages are in use; check num_available before allocate().")
        self._num_users[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a user to a live or cached page."""
        if self._num_users[page] == 0:
            if page not in self._cached:
                raise RuntimeError(f"Page {page} is free; only live and cached pages can be shared.")
            del self._cached[page]
        self._num_users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take a user off each page. Pages late in a sequence become the first to be evicted.

        Raises:
            RuntimeError: A page has no user.
        """
        for page in reversed(pages):
            if self._num_users[page] == 0:
                raise RuntimeError(f"Page {page} is released but nobody holds it.")
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                if self._nodes[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def make_writable(self, pages: list[int], index: int) -> tuple[int, int] | None:
        """Make `pages[index]` safe to write, replacing it by a fresh page if others use it or the tree knows it.

        Returns:
            (source, destination) of the copy that must happen before the write, or None if none is needed.
        """
        page = pages[index]
        if self.is_writable(page):
            return None
        pages[index] = self.allocate()
        self.release([page])
        return page, pages[index]

    def is_writable(self, page: int) -> bool:
        """Whether one sequence alone holds the page and the prefix tree does not know it."""
        return self._num_users[page] == 1 and self._nodes[page] is None

    def match(self, token_ids: Sequence[int], salt: Hashable = None) -> list[PrefixNode]:
        """Find the longest cached prefix, as the nodes of its full pages. Takes no references: `share` the pages."""
        nodes: list[PrefixNode] = []
        for start in range(0, len(token_ids) - self.page_size + 1, self.page_size):
            parent = nodes[-1] if nodes else self.root
            node = parent.children.get(self._key(parent, token_ids[start : start + self.page_size], salt))
            if node is None:
                break
            nodes.append(node)
        return nodes

    def remember(self, parent: PrefixNode, tokens: Sequence[int], page: int, salt: Hashable = None) -> PrefixNode:
        """Enter a full page into the prefix tree, under the node of the page before it.

        If the tree already holds these contents in another page, that page stays and this one remains unknown.

        Args:
            parent: Node of the previous page, or `root` for the first.
            tokens: The page's token ids, exactly `page_size` of them.
            page: A live page that holds their keys and values.
            salt: Prefixes of different salts share nothing.

        Returns:
            The node of these contents, the parent of the next page's.
        """
        if len(tokens) != self.page_size:
            raise ValueError(f"remember() got {len(tokens)} tokens; only full pages of {self.page_size} are shared.")
        was_forgotten = parent.parent is None and parent is not self.root
        if not self.prefix_caching or was_forgotten:
            return parent
        key = self._key(parent, tokens, salt)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PrefixNode(parent, key, page)
            self._nodes[page] = node
        return node

    def forget_all(self) -> None:
        """Empty the prefix tree: what the pages hold is no longer valid (new weights, a lost cache)."""
        for node in list(self.root.children.values()):
            self._forget(node)

    def _key(self, parent: PrefixNode, tokens: Sequence[int], salt: Hashable) -> Hashable:
        return (salt, *tokens) if parent is self.root else tuple(tokens)

    def _forget(self, node: PrefixNode) -> None:
        """Take a node and all below it, which nobody could find any more, out of the tree."""
        del node.parent.children[node.key]
        for below in list(_subtree(node)):
            below.parent = None
            self._nodes[below.page] = None
            if below.page in self._cached:
                del self._cached[below.page]
                self._free.append(below.page)


def _subtree(node: PrefixNode) -> Iterator[PrefixNode]:
    stack = [node]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
