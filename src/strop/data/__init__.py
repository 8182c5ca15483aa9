"""Data: rows from files, the Hub or Python, in a seeded order that resumes exactly, rendered to token ids.

Source of the words: `docs/architecture.md`, section 4. This room imports the configuration and nothing else of strop.
"""

from strop.data.order import Cursor
from strop.data.prompts import OverlongPrompt, Prompt, PromptDataset, PromptStream
from strop.data.rows import RowsSource
from strop.data.sources import Source, open_source

__all__ = ["Cursor", "OverlongPrompt", "Prompt", "PromptDataset", "PromptStream", "RowsSource", "Source", "open_source"]
