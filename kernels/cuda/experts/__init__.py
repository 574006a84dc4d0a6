"""Products with the weights of a mixture of experts."""

from pdserve.kernels.cuda.experts.grouped import MatrixStack, grouped_product, tile_tokens
from pdserve.kernels.cuda.experts.grouping import Groups, group
from pdserve.kernels.cuda.experts.routing import choose
