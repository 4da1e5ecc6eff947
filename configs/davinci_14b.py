"""daVinci-kernel on Qwen3-14B-Base (arXiv 2606.16497): the recipe of configs/davinci_8b.py, figures and switches, on a larger model."""

from ml_collections import ConfigDict

from configs.davinci_8b import get_config as davinci_8b


def get_config() -> ConfigDict:
    c = davinci_8b()
    c.model.init = "qwen3-14b"
    return c
