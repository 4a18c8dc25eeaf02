"""`PluggableLayer`: a whole layer that an out-of-tree plugin may replace.

Owns the class. It has no forward methods by platform; those are `CustomOp`'s.
"""

from irframework.layers.replacement import ReplaceableLayer, add_base


@add_base
class PluggableLayer(ReplaceableLayer):
    """A layer, with its parameters and inner modules, that may be replaced as a whole.

    `@PluggableLayer.register("name")` registers it; `@Layer.register_oot` on a subclass of it, or
    `@PluggableLayer.register_oot(name="Layer")`, makes every `Layer(...)` build that subclass. Unlike a `CustomOp` it
    has one `forward`, which the class writes itself.
    """
