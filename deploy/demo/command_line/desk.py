"""The desk as a command line: its commands, and the words of mini-swe-agent's configuration.

Both sides import this module, so it needs the standard library and `shop_desk.shop` alone: the
player in mini-swe-agent's environment, and the agent and the base model's warm start in ForgeMQ's.
"""

from typing import Any

from shop_desk.shop import ITEMS, Order

SYSTEM = "Commands: price, total, answer."
BAD_COMMAND = "bad command"
STEPS_MAX = 9

AGENT: dict[str, Any] = {
    "system_template": SYSTEM,
    "instance_template": "{{ task }}",
    "step_limit": STEPS_MAX,
    # mini-swe-agent drops a turn that it cannot read from its history, so going on would fork.
    "max_consecutive_format_errors": 1,
}
MODEL: dict[str, Any] = {
    # What a shell says about a command that it does not know differs between machines.
    "observation_template": (
        f"{{% if output.returncode %}}{BAD_COMMAND}{{% endif %}}"
        "{% if not output.returncode %}{{ output.output | trim }}{% endif %}"
    ),
    "format_error_template": BAD_COMMAND,
}
"""Fields of mini-swe-agent's configuration; what is absent has its default."""

BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The bash command to execute"}
            },
            "required": ["command"],
        },
    },
}
"""The tool that mini-swe-agent 2.4.6 offers; tests/clients compares them."""

_TOTAL = """#!/bin/sh
# total COUNT ITEM PRICE, COUNT ITEM PRICE: adds the lines up, and says what answers with the sum
sum=0
[ $# -gt 0 ] && [ $(($# % 3)) -eq 0 ] || exit 1
while [ $# -gt 0 ]; do
    price=$3
    [ $# -gt 3 ] && { price=${3%,}; [ "$price" != "$3" ] || exit 1; }
    case "$1$price" in *[!0-9]*) exit 1 ;; esac
    sum=$((sum + $1 * price))
    shift 3
done
echo "answer $sum"
"""
_ANSWER = """#!/bin/sh
# answer N: ends the task; mini-swe-agent knows the first line
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
echo "$@"
"""


ENVIRON = {"PATH": "/program"}
"""All that a command sees: the shell finds the desk's commands alone."""


def commands(order: Order) -> dict[str, str]:
    """The commands of this customer's desk, by name."""
    return {"price": _price(order), "total": _TOTAL, "answer": _ANSWER}


def _price(order: Order) -> str:
    pages = "".join(f"'1 {item}') echo '{order.page(item)}' ;;\n" for item in ITEMS)
    return f'#!/bin/sh\ncase "$# $1" in\n{pages}*) exit 1 ;;\nesac\n'
