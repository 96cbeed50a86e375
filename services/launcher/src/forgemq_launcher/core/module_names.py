"""Which names a Python module has, read from its syntax tree: none of its code runs."""

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_MADE_AT_RUN_TIME = frozenset(
    (
        *("globals", "locals", "vars", "exec", "eval", "setattr", "__dict__", "f_globals"),
        *("modules", "import_module", "__import__", "__getattr__", "__path__"),
    )
)
"""Words by which a module may have names that are not in its text."""


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of a module.

    Attributes:
        bound: Every name that its text may bind.
        called: Of these, functions, classes and what is imported: what can be called.
        is_complete: False if it may have more than `bound`.
    """

    bound: frozenset[str]
    called: frozenset[str]
    is_complete: bool


def module_names(source: bytes) -> ModuleNames:
    """The names of the module with this source.

    Raises:
        SyntaxError: Python does not take it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # The service that imports it shows them.
        tree = ast.parse(source)
    every = tuple(ast.walk(tree))
    outer = tuple(_outer_nodes(tree))
    imported = [name for node in outer for name in _imported_names(node)]
    called = {node.name for node in outer if isinstance(node, _DEFINITIONS)} | {*imported}
    # A function may bind a name of its module, too.
    shared = {name for node in every if isinstance(node, ast.Global) for name in node.names}
    stored = {name for node in outer for name in _stored_names(node)}
    return ModuleNames(
        bound=frozenset(called | shared | stored),
        called=frozenset(called - {"*"}),
        is_complete="*" not in imported and _MADE_AT_RUN_TIME.isdisjoint(_words(every)),
    )


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)


def _outer_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported, but for the bodies of classes."""
    yield node
    inner = [] if not isinstance(node, (*_DEFINITIONS, ast.Lambda)) else node.body
    bodies = inner if isinstance(inner, list) else [inner]
    for child in ast.iter_child_nodes(node):
        if child not in bodies:
            yield from _outer_nodes(child)


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (each.asname or each.name.partition(".")[0] for each in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (each.asname or each.name for each in node.names)


def _stored_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)) | ast.ExceptHandler(name=str(name)):
            yield name


def _words(nodes: tuple[ast.AST, ...]) -> set[str]:
    """Names, attributes and functions that a module's text mentions anywhere."""
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | attributes | {node.name for node in nodes if isinstance(node, _FUNCTIONS)}
