"""Completion scripts for bash, zsh and fish: pure functions of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktopt.cli.completion import Argument, CommandLine

_HEAD = "# Completion of ktopt for {shell}; made by `ktopt completion {shell}`.\n"


def bash(commands: Sequence[CommandLine]) -> str:
    cases, files = [], []
    for command in commands:
        for argument in command.arguments:
            if argument.names and argument.value:
                pattern = "|".join(f"'{command.name} {name}'" for name in argument.names)
                cases.append(f"        {pattern}) words='{' '.join(argument.words)}' files={int(argument.files)} ;;\n")
        options = " ".join(name for argument in command.arguments for name in argument.names)
        positional = [a for a in command.arguments if not a.names]
        words = " ".join(word for a in positional for word in a.words)
        wants_files = int(any(a.files for a in positional))
        files.append(f"            {command.name}) options='{options}' words='{words}' files={wants_files} ;;\n")
    return _HEAD.format(shell="bash") + _BASH.replace("@COMMANDS@", " ".join(c.name for c in commands)).replace(
        "@VALUES@", "".join(cases)
    ).replace("@OPTIONS@", "".join(files))


_BASH = """\
_ktopt() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local words='' options='' files=0
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '@COMMANDS@ --help --version' -- "$current"))
        return
    fi
    if [[ $current == '=' ]]; then current=''; elif [[ $previous == '=' ]]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi
    case "$command $previous" in
@VALUES@        *)
            case $command in
@OPTIONS@            esac
            if [[ $current == -* ]]; then words=$options files=0; fi ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if ((files)); then
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}
complete -F _ktopt ktopt
"""


def zsh(commands: Sequence[CommandLine]) -> str:
    described = "".join(f"        {_quoted(f'{c.name}:{c.summary}')}\n" for c in commands)
    cases = "".join(f"        {c.name}) _arguments -s -S {' '.join(map(_zsh_argument, c.arguments))} ;;\n" for c in commands)
    return "#compdef ktopt\n" + _HEAD.format(shell="zsh") + _ZSH.replace("@COMMANDS@", described).replace("@CASES@", cases)


_ZSH = """\
_ktopt() {
    local -a commands
    commands=(
@COMMANDS@    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
@CASES@    esac
}
if [[ $funcstack[1] == _ktopt ]]; then _ktopt "$@"; else compdef _ktopt ktopt; fi
"""


def _zsh_argument(argument: Argument) -> str:
    """One specification of _arguments: names, help in brackets, and what completes the value."""
    action = ""
    if argument.value:
        what = " ".join(argument.words)
        completes = f"({what})" if what and not argument.files else "_files"
        if what and argument.files:
            completes = f"{{compadd -- {what}; _files}}"
        action = f":{argument.value.replace(':', ' ')}:{completes}"
    if not argument.names:
        return _quoted(("*" if argument.repeats else "") + action)
    help = "".join("\\" + c if c in "[]\\" else c for c in argument.help)
    begin = "*" if argument.repeats else f"({' '.join(argument.names)})"
    return " ".join(_quoted(f"{begin}{name}[{help}]{action}") for name in argument.names)


def fish(commands: Sequence[CommandLine]) -> str:
    lines = ["complete -c ktopt -f\n"]
    for command in commands:
        lines.append(f"complete -c ktopt -n __fish_use_subcommand -a {command.name} -d {_fish(command.summary)}\n")
    for command in commands:
        when = f"complete -c ktopt -n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"{when}{part}\n" for argument in command.arguments for part in _fish_argument(argument)]
    return _HEAD.format(shell="fish") + "".join(lines)


def _fish_argument(argument: Argument) -> list[str]:
    """What defines an argument, and what lists its values: fish would give the option's help to each of them."""
    name = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in argument.names)
    if argument.value and argument.names:
        name += " -r" if argument.files else " -x"
    if argument.files:
        name += " -F"
    described = f" -d {_fish(argument.help)}" if argument.help and argument.names else ""
    values = [f"{name} -a {_fish(' '.join(argument.words))}"] if argument.words else []
    return ([name + described] if name else []) + values


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
