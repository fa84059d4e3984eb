"""Prompts: a file of chats for the target to answer, and a way to have it write the questions.

A prompt file holds one JSON object per line: {"task": "qa", "messages": [{"role": "user", ...}]}.

The target writes its own users' turns from their first words (Xu et al. 2024, "Magpie": a chat
model that is given an open user turn goes on as a user). Code and passages come from Python's
standard library, which stands on every machine; none of it is kept but in the prompt file.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UsageError


@dataclass(frozen=True)
class Prompt:
    """A chat to answer and the kind of work it is."""

    task: str
    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Opening:
    """The first words of a user's turn; `is_whole` where nothing is to be added."""

    task: str
    text: str
    is_whole: bool = False


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file. Raises UsageError naming the line at fault."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    prompts = [
        _parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """One JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            line = {"task": prompt.task, "messages": [dict(m) for m in prompt.messages]}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def openings(count: int, seed: int) -> list[Opening]:
    """`count` beginnings of users' turns, the tasks in turn, the same for the same seed."""
    rng = random.Random(seed)
    makers = [
        _chat,
        _chat,
        _chat,
        _question,
        _summary,
        _translation,
        _maths,
        _code_edit,
        _code,
        _passage,
    ]
    functions, passages = list(standard_functions(_MODULES)), list(_passages())
    made = []
    for index in range(count):
        maker = makers[index % len(makers)]
        pool: Sequence[str] = functions if maker is _code_edit else passages
        made.append(maker(rng, pool))
    return made


def _parse(line: str, where: str) -> Prompt:
    try:
        fields: Any = json.loads(line)
        messages = tuple(
            {"role": str(m["role"]), "content": str(m["content"])} for m in fields["messages"]
        )
        return Prompt(str(fields["task"]), messages)
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f'{where} is not a prompt; a line reads {{"task": "qa", "messages": '
            '[{"role": "user", "content": "..."}]}'
        ) from None


def _chat(rng: random.Random, _: Sequence[str]) -> Opening:
    return Opening("chat", rng.choice(_CHAT))


def _question(rng: random.Random, _: Sequence[str]) -> Opening:
    return Opening("qa", rng.choice(_QUESTIONS))


def _maths(rng: random.Random, _: Sequence[str]) -> Opening:
    name, other = rng.sample(_NAMES, 2)
    thing, price, few = rng.choice(_THINGS), rng.randint(2, 60), rng.randint(2, 12)
    start = rng.choice(_MATHS).format(name=name, other=other, thing=thing, n=price, k=few)
    return Opening("math", start)


def _translation(rng: random.Random, _: Sequence[str]) -> Opening:
    parts = [rng.choice(column) for column in _GERMAN]
    sentence = " ".join(parts)
    if rng.random() < 0.4:
        sentence += ", " + " ".join(rng.choice(column) for column in _GERMAN_CLAUSE)
    return Opening("translation", f"Translate German to English: {sentence} .", is_whole=True)


def _summary(rng: random.Random, passages: Sequence[str]) -> Opening:
    text = rng.choice(_SUMMARIES)
    if rng.random() < 0.5:
        return Opening("summary", f"{text} {rng.choice(_NEWS)}")
    return Opening("summary", f"{text} {rng.choice(passages)}", is_whole=True)


def _passage(rng: random.Random, passages: Sequence[str]) -> Opening:
    return Opening("rag", f"{rng.choice(passages)}\n\n{rng.choice(_ABOUT)}")


def _code(rng: random.Random, _: Sequence[str]) -> Opening:
    return Opening("code", rng.choice(_CODE))


def _code_edit(rng: random.Random, functions: Sequence[str]) -> Opening:
    edit, function = rng.choice(_EDITS), rng.choice(functions)
    return Opening("code edit", f"{edit}\n\n```python\n{function}\n```", is_whole=True)


def standard_functions(modules: Sequence[str]) -> Iterator[str]:
    """Functions of 5 to 30 lines of modules of Python's standard library."""
    for source in _sources(modules):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if 5 <= len(lines) <= 30:
                    yield textwrap.dedent("\n".join(lines))


def standard_text() -> str:
    """The sources of some of the standard library's modules, one after the other."""
    return "\n".join(_sources(_MODULES))


def _passages() -> Iterator[str]:
    """Docstrings of 200 to 1500 characters of the standard library, as flowing text."""
    for source in _sources(_MODULES):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = " ".join((ast.get_docstring(node) or "").split())
                if 200 <= len(text) <= 1500:
                    yield text


def _sources(modules: Sequence[str]) -> Iterator[str]:
    for module in modules:
        found = importlib.util.find_spec(module)
        if found is not None and found.origin is not None:
            yield Path(found.origin).read_text(encoding="utf-8")


_MODULES = (
    "argparse", "ast", "bisect", "calendar", "collections", "configparser", "csv", "datetime",
    "difflib", "email.message", "enum", "fractions", "functools", "gettext", "heapq", "html.parser",
    "http.client", "imaplib", "inspect", "ipaddress", "json.decoder", "json.encoder", "locale",
    "logging", "mailbox", "mimetypes", "optparse", "pathlib", "pprint", "queue", "random", "shlex",
    "shutil", "smtplib", "socketserver", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "tokenize", "traceback", "urllib.parse", "uuid",
    "zipfile",
)  # fmt: skip

_CHAT = (
    "", "", "", "", "Write", "Write a short story about", "Write a poem about", "Compose an email",
    "Explain", "Explain to a child", "Describe", "Give me", "Give me tips for", "Help me",
    "I want to", "I am writing", "I'm working on", "I have been", "Imagine you are", "Pretend",
    "Act as a", "Suggest", "Create a", "Create a list of", "Design", "Draft", "Compare", "Discuss",
    "How can I", "How do I", "How would you", "Can you", "Could you", "Please", "Tell me about",
    "Let's", "What are some", "What do you think about", "Rewrite", "Edit the following paragraph",
    "Generate", "Plan a", "Outline", "Why", "Hi,", "Hello!", "Hey,", "You are", "As a teacher,",
    "Brainstorm", "Provide", "Summarize the plot of", "Identify", "Analyze", "List", "Evaluate the",
    "Write a persuasive", "Write a descriptive paragraph about", "Write a dialogue between",
    "Write a blog post about", "Write a review of", "Write a letter to", "Picture yourself as a",
)  # fmt: skip

_QUESTIONS = (
    "Who", "Who was the first", "Who wrote", "Who plays", "Who sang", "Who is the", "What is",
    "What is the capital", "What is the name of", "What does", "What year did", "What are the",
    "When did", "When was", "When is", "Where is", "Where was", "Where does", "Which",
    "Which country", "Which of the", "How many", "How much", "How long", "How old", "How far",
    "How is", "Why do", "Why is", "Is it", "Do", "Did", "In which", "In what year", "Name the",
    "who won the", "where do", "what is the", "when does the", "how many episodes", "who played",
    "where did the", "what is the meaning of", "who invented", "what part of",
)  # fmt: skip

_MATHS = (
    "{name} has {n} {thing} and gives {k} of them to {other}.",
    "{name} buys {k} {thing} for ${n} each.",
    "{name} earns ${n} an hour and works {k} hours a day.",
    "{name} and {other} share {n} {thing}.",
    "A store sells {thing} at ${n}.",
    "There are {n} {thing} in a box.",
    "If {name} reads {n} pages a day,",
    "{name} is {n} years old and {other} is {k} years younger.",
    "A train travels {n} miles in {k} hours.",
    "{name} is baking cookies. Each batch needs {k} cups of flour.",
    "{name} wants to save ${n}.",
    "In a class of {n} students,",
    "The perimeter of a rectangle is {n} cm.",
    "Solve for x:",
    "Find the value of",
    "What is {n} percent of",
    "A farmer has {n}",
    "{name} runs {k} miles every morning.",
    "{name} had {n} {thing}. After selling half of them in the morning,",
    "Calculate",
)
_NAMES = (
    "Anna", "Ben", "Carlos", "Dina", "Elena", "Frank", "Grace", "Hugo", "Ines", "James", "Kim",
    "Liam", "Maria", "Nora", "Omar", "Paula", "Ravi", "Sarah", "Tom", "Wendy",
)  # fmt: skip
_THINGS = (
    "apples", "books", "pencils", "marbles", "tickets", "eggs", "stamps", "cupcakes", "shirts",
    "flowers", "oranges", "cards", "bottles", "chairs", "balloons",
)  # fmt: skip

_GERMAN = (
    (
        "Der Minister", "Die Regierung", "Ein Sprecher der Polizei", "Die junge Frau",
        "Das Unternehmen", "Der Präsident des Vereins", "Die Mannschaft", "Unser Nachbar",
        "Eine Gruppe von Wissenschaftlern", "Der Bürgermeister der Stadt", "Die Lehrerin",
        "Der alte Mann", "Die Europäische Union", "Das neue Gesetz", "Meine Schwester",
        "Der Trainer", "Die Zeitung", "Ein Zeuge", "Die Forscher", "Das Kind",
    ),
    (
        "hat gestern", "wird morgen", "hat in Berlin", "konnte am Freitag",
        "wollte im letzten Jahr",
        "hat nach langer Diskussion", "soll in den nächsten Wochen", "hat zum ersten Mal",
        "muss trotz der Kritik", "hat am Dienstag", "darf ab Januar", "hat während der Sitzung",
    ),
    (
        "einen wichtigen Vertrag", "die Ergebnisse der Untersuchung", "das alte Haus am Fluss",
        "die Preise für Strom und Gas", "eine Rede vor dem Parlament", "mehr als hundert Briefe",
        "den Plan für die neue Schule", "die Zahl der Besucher", "ein Spiel gegen München",
        "das Geld für die Reparatur", "die Fragen der Journalisten", "einen Bericht über das Klima",
        "die Straße zum Bahnhof", "das Buch ihres Vaters", "eine Lösung für das Problem",
    ),
    (
        "vorgestellt", "abgelehnt", "gefunden", "unterschreiben", "verloren", "erklären",
        "veröffentlicht", "verkauft", "verbessern", "gewonnen", "besprochen", "bezahlen",
        "beantwortet", "verändert", "geschrieben",
    ),
)  # fmt: skip
_GERMAN_CLAUSE = (
    ("weil", "obwohl", "nachdem", "während", "damit", "sodass"),
    (
        "die Menschen", "viele Eltern", "die Mitarbeiter", "seine Freunde", "die Nachbarn",
        "mehrere Länder", "die Kinder", "die Behörden",
    ),
    (
        "keine Zeit", "große Angst", "eine bessere Zukunft", "mehr Sicherheit", "wenig Hoffnung",
        "eine andere Meinung", "genug Wasser",
    ),
    ("hatten", "haben", "brauchen", "suchten", "wollten"),
)  # fmt: skip

_SUMMARIES = (
    "Summarize:", "Summarize:", "Summarize the following article:", "Summarize this text:",
    "Give a one sentence summary of this passage:", "What are the main points of this text?",
    "TL;DR:", "Write a concise summary:", "Summarize the key findings:",
)  # fmt: skip
_NEWS = (
    "(CNN) --", "LONDON, England (CNN) --", "By", "A man was arrested", "A woman who",
    "The president",
    "Police in", "Scientists have", "Manchester United", "The company announced", "A new study",
    "It was a night", "Thousands of people", "The government has", "Two people",
    "A mother of three",
    "The city council", "An American", "After years of", "Officials said on Monday",
)  # fmt: skip
_ABOUT = (
    "Question: What", "Question: Who", "Question: When", "Question: Why", "Question: How",
    "Based on this text, what", "Based on the passage above, answer this: what is", "What is",
    "According to the text, how", "Using only this text, explain",
)  # fmt: skip
_CODE = (
    "Write a Python function that", "Write a Python program to", "Implement", "Write a function to",
    "Write a C++ program", "Write a JavaScript function", "How do I sort", "Write a SQL query",
    "What does this code do?\n\n```python\ndef", "Fix the bug in this code:\n\n```python\n",
    "Create a class", "Write an HTML page", "Write a regular expression", "Implement a program to",
    "Write a bash script", "Write a simple website in HTML", "Explain how to", "Given an array",
)  # fmt: skip
_EDITS = (
    "Add a docstring to this function and return the whole code.",
    "Rename the variables to something clearer and return the whole function.",
    "Add type hints to this function and show the full code.",
    "Add comments to this code. Return everything.",
    "Fix any bugs in this function and print the corrected code in full.",
    "Rewrite this function so that it logs its arguments; keep the rest as it is.",
    "Change the name of this function to process_data and repeat the code.",
    "Return the following code with every single quote replaced by a double quote.",
    "Add an early return for empty input to this function, and give me the complete function.",
    "Repeat this function exactly, then explain it.",
    "Refactor this function and output the entire result:",
    "Make this function raise ValueError for bad input. Show the complete code.",
)
