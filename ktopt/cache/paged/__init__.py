"""A cache in pages for many sequences of a model at once, for continuous batching: they join and leave between steps, share the
pages of prefixes that they have in common, and a step runs all of them.

    allocator.py  whose each page is, and the index of prefixes     sequence.py  one sequence
    pools.py      the memory of a layer                             cache.py     all of it
    batch.py      what a model's layers get for one step            forward.py   one step
    attention.py  attention to pages in torch                       model.py     how a model is called, and what its layers keep
    latents.py    latents of one sequence                           prefixes.py  pages of prefixes on disk
"""

from ktopt.cache.paged.allocator import NoRoom
from ktopt.cache.paged.cache import PagedCache
from ktopt.cache.paged.forward import forward_paged
from ktopt.cache.paged.model import cannot_page
from ktopt.cache.paged.prefixes import PrefixFolder
from ktopt.cache.paged.sequence import Sequence

__all__ = ["NoRoom", "PagedCache", "PrefixFolder", "Sequence", "cannot_page", "forward_paged"]
