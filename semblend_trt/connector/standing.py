"""What stands for the whole life of an engine: the model's facts, or the reason for which nothing is reused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.eligibility import engine_refusal
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import ConfigurationError, UnsupportedModelError
from semblend_trt.policy import allows_reuse, terms_of

if TYPE_CHECKING:
    from semblend_trt.config import Settings
    from semblend_trt.connector.model_facts import ModelFacts

logger = logging.getLogger(__name__)


def facts_or_refusal(llm_args: Any, settings: Settings) -> tuple[ModelFacts | None, str | None]:
    """The model's facts, or the reason for which no request of this engine may be reused. Never raises."""
    if not allows_reuse(settings.policy):
        return None, "policy_off"
    refusal = engine_refusal(llm_args)
    if refusal is not None:
        logger.warning("KV reuse is off: the engine uses %s, with which block contents cannot be trusted", refusal)
        return None, refusal
    try:
        facts = model_facts(llm_args.model, getattr(llm_args, "revision", None))
        terms_of(settings.policy, settings, facts.num_layers)
    except ConfigurationError as error:
        logger.error("KV reuse is off: %s", error)
        return None, "configuration"
    except UnsupportedModelError as error:
        logger.warning("KV reuse is off for this model: %s", error)
        return None, error.reason
    except Exception:
        logger.exception("KV reuse is off: the model's configuration cannot be read")
        return None, "model_unreadable"
    return facts, None
