"""The page pool against a memory that is really written and read."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flax_paged.generation.pages import PagePool


def grow(pool, pages, num_tokens):
    while len(pages) < pool.pages_for(num_tokens):
        pages.append(pool.allocate())


def remember_all(pool, tokens, pages, salt=None):
    node = pool.root
    for i in range(len(tokens) // pool.page_size):
        node = pool.remember(node, tokens[i * pool.page_size : (i + 1) * pool.page_size], pages[i], salt)
    return node


class Answer:
    def __init__(self, salt):
        self.salt, self.tokens, self.pages = salt, [], []
        self.node, self.num_remembered = None, 0


class PoolAgainstMemory(RuleBasedStateMachine):
    """Sequences write tokens to the pages they are given; what they read back must be what they wrote."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(num_pages=9, page_size=3)
        self.memory = {page: [None] * 3 for page in range(9)}
        self.answers: list[Answer] = []

    def write(self, answer, token):
        """Append a token as the scheduler does; False if there is no page for it."""
        index, offset = divmod(len(answer.tokens), 3)
        is_new = index == len(answer.pages)
        if (is_new or not self.pool.is_writable(answer.pages[index])) and self.pool.num_available == 0:
            return False
        if is_new:
            answer.pages.append(self.pool.allocate())
        elif copy := self.pool.make_writable(answer.pages, index):
            self.memory[copy[1]] = list(self.memory[copy[0]])
        page = answer.pages[index]
        assert sum(page in other.pages for other in self.answers) == 1, "written while shared"
        self.memory[page][offset] = token
        answer.tokens.append(token)
        if len(answer.tokens) % 3 == 0:
            answer.node = self.pool.remember(answer.node, answer.tokens[-3:], page, answer.salt)
        return True

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from([None, "a"]))
    def start(self, tokens, salt):
        answer = Answer(salt)
        self.answers.append(answer)
        nodes = self.pool.match(tokens[:-1], salt)
        for node in nodes:
            self.pool.share(node.page)
            answer.pages.append(node.page)
        answer.tokens = tokens[: len(nodes) * 3]
        answer.node = nodes[-1] if nodes else self.pool.root
        for token in tokens[len(answer.tokens) :]:
            if not self.write(answer, token):
                return self.finish_last()

    def finish_last(self):
        self.pool.release(self.answers.pop().pages)

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        self.write(data.draw(st.sampled_from(self.answers)), token)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def fork(self, data):
        source = data.draw(st.sampled_from(self.answers))
        fork = Answer(source.salt)
        fork.tokens, fork.pages, fork.node = list(source.tokens), list(source.pages), source.node
        for page in fork.pages:
            self.pool.share(page)
        self.answers.append(fork)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def finish(self, data):
        answer = data.draw(st.sampled_from(self.answers))
        self.answers.remove(answer)
        self.pool.release(answer.pages)

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        assert self.pool.num_cached == 0
        for answer in self.answers:
            assert self.pool.match(answer.tokens, answer.salt) == []

    @invariant()
    def everyone_reads_what_they_wrote(self):
        for answer in self.answers:
            read = [token for page in answer.pages for token in self.memory[page]]
            assert read[: len(answer.tokens)] == answer.tokens
            found = [token for node in self.pool.match(answer.tokens, answer.salt) for token in self.memory[node.page]]
            assert found == answer.tokens[: len(found)]

    @invariant()
    def every_page_is_somewhere_once(self):
        held = [page for answer in self.answers for page in answer.pages]
        assert [self.pool.num_users(page) for page in range(9)] == [held.count(page) for page in range(9)]
        assert self.pool.num_live == len(set(held))
        idle = [*self.pool._free, *self.pool._cached]
        assert sorted(idle + list(set(held))) == list(range(9))


TestPoolAgainstMemory = PoolAgainstMemory.TestCase
TestPoolAgainstMemory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (4, 1), (7, 2), (8, 2), (9, 3)])
def test_pages_for_lengths_around_the_page_size(num_tokens, num_pages):
    assert PagePool(8, 4).pages_for(num_tokens) == num_pages


def test_all_pages_come_back():
    pool, pages = PagePool(3, 4), []
    grow(pool, pages, 9)
    assert sorted(pages) == [0, 1, 2] and pool.num_available == 0
    with pytest.raises(RuntimeError, match="All 3 pages are in use"):
        pool.allocate()
    pool.release(pages)
    assert (pool.num_available, pool.num_live) == (3, 0)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.release(pages[:1])


def test_recycled_page_no_longer_matches_its_old_prefix():
    pool, pages = PagePool(2, 4), []
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    grow(pool, pages, 8)
    remember_all(pool, tokens, pages)
    pool.release(pages)
    assert [node.page for node in pool.match(tokens)] == pages
    assert pool.allocate() == pages[1]  # the tail is evicted first
    assert [node.page for node in pool.match(tokens)] == pages[:1]
    pool.allocate()
    assert pool.match(tokens) == []


def test_least_recently_used_prefix_is_evicted_first():
    pool = PagePool(2, 2)
    first, second = [pool.allocate()], [pool.allocate()]
    remember_all(pool, [1, 1], first)
    remember_all(pool, [2, 2], second)
    pool.release(first)
    pool.release(second)
    pool.share(first[0])  # used again, so now the younger
    pool.release(first)
    assert pool.allocate() == second[0]
    assert pool.match([1, 1]) and not pool.match([2, 2])


@pytest.mark.parametrize(
    ("stored", "asked"),
    [([65] * 8, [321] * 8), ([1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9, 9, 5, 6, 7, 8]), ([-1] * 8, [-2] * 8)],
    ids=["equal modulo 256", "same page after another prefix", "equal hashes"],
)
def test_only_equal_prefixes_match(stored, asked):
    # hash(-1) == hash(-2) in CPython: the tree compares token ids, so equal hashes do no harm.
    pool, pages = PagePool(4, 4), []
    grow(pool, pages, 8)
    remember_all(pool, stored, pages)
    assert len(pool.match(stored)) == 2
    assert pool.match(asked) == []
    assert pool.match(stored, salt="another") == []


def test_page_of_a_fork_is_copied_before_it_is_written():
    pool = PagePool(3, 4)
    pages = [pool.allocate()]
    assert pool.make_writable(pages, 0) is None
    fork = list(pages)
    pool.share(pages[0])
    old = pages[0]
    source, destination = pool.make_writable(fork, 0)
    assert (source, destination) == (old, fork[0]) and destination != old
    assert pool.make_writable(pages, 0) is None  # the other is gone, so no second copy


def test_a_free_page_cannot_be_shared():
    with pytest.raises(RuntimeError, match="Page 0 is free"):
        PagePool(1, 4).share(0)


def test_prefix_caching_can_be_turned_off():
    pool = PagePool(2, 4, prefix_caching=False)
    pages = [pool.allocate()]
    remember_all(pool, [1, 2, 3, 4], pages)
    pool.release(pages)
    assert pool.match([1, 2, 3, 4]) == [] and pool.num_cached == 0


@pytest.mark.parametrize("name", ["num_pages", "page_size"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"PagePool\\({name}=0\\)"):
        PagePool(**{"num_pages": 2, "page_size": 2, name: 0})


def test_part_filled_page_is_not_remembered():
    pool = PagePool(2, 4)
    with pytest.raises(ValueError, match="only full pages of 4"):
        pool.remember(pool.root, [1, 2, 3], pool.allocate())
