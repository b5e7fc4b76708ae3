"""Models of monai."""

from __future__ import annotations

from tests.models.registry.entry import Inputs, of, tensors

# ------------------------------------------------------------------------------------------- monai

FLAT, SOLID = tensors(x=(1, 32, 32)), tensors(x=(1, 16, 16, 16))
UNETS = {"in_channels": 1, "out_channels": 2}
DEEP = {"channels": (4, 8, 16), "strides": (2, 2)}


def solid(edge: int, name: str = "x") -> Inputs:
    """Volumes."""
    return tensors(**{name: (1, edge, edge, edge)})


of(
    "monai",
    "U-Net",
    "UNet 2D",
    FLAT,
    "UNet",
    spatial_dims=2,
    **UNETS,
    **DEEP,
    num_res_units=2,
    fast=True,
)
of("monai", "U-Net", "UNet 3D", SOLID, "UNet", spatial_dims=3, **UNETS, **DEEP, num_res_units=2)
of("monai", "U-Net", "BasicUNet", FLAT, spatial_dims=2, **UNETS, features=(4, 4, 8, 8, 16, 4))
of(
    "monai",
    "U-Net",
    "BasicUNetPlusPlus",
    FLAT,
    spatial_dims=2,
    **UNETS,
    features=(4, 4, 8, 8, 16, 4),
)
of("monai", "U-Net", "AttentionUnet", FLAT, spatial_dims=2, **UNETS, **DEEP)
of(
    "monai",
    "U-Net",
    "DynUNet",
    SOLID,
    spatial_dims=3,
    **UNETS,
    kernel_size=[3, 3, 3],
    strides=[1, 2, 2],
    upsample_kernel_size=[2, 2],
    filters=[4, 8, 16],
    deep_supervision=True,
)
of(
    "monai",
    "U-Net",
    "FlexibleUNet",
    tensors(inputs=(1, 32, 32)),
    **UNETS,
    backbone="efficientnet-b0",
    pretrained=False,
    decoder_channels=(16, 8, 8, 8, 8),
)
of(
    "monai",
    "U-Net",
    "UNETR",
    tensors(x_in=(1, 32, 32, 32)),
    **UNETS,
    img_size=(32, 32, 32),
    feature_size=4,
    hidden_size=24,
    mlp_dim=32,
    num_heads=4,
)
of(
    "monai",
    "U-Net",
    "SwinUNETR",
    tensors(x_in=(1, 64, 64)),
    **UNETS,
    feature_size=12,
    spatial_dims=2,
    depths=(1, 1, 1, 1),
    num_heads=(2, 2, 2, 2),
)
of(
    "monai",
    "segmentation",
    "SegResNet",
    SOLID,
    spatial_dims=3,
    init_filters=4,
    **UNETS,
    blocks_down=(1, 1, 1),
    blocks_up=(1, 1),
    norm=("GROUP", {"num_groups": 2}),
)
of(
    "monai",
    "segmentation",
    "SegResNetDS",
    FLAT,
    spatial_dims=2,
    init_filters=4,
    **UNETS,
    blocks_down=(1, 1, 1),
    dsdepth=2,
)
of("monai", "segmentation", "VNet", solid(16), **UNETS, spatial_dims=3)
of("monai", "segmentation", "HighResNet", FLAT, spatial_dims=2, **UNETS)
of(
    "monai",
    "segmentation",
    "MedNeXt",
    FLAT,
    spatial_dims=2,
    init_filters=4,
    **UNETS,
    encoder_expansion_ratio=2,
    decoder_expansion_ratio=2,
    bottleneck_expansion_ratio=2,
    blocks_down=(1, 1, 1, 1),
    blocks_bottleneck=1,
    blocks_up=(1, 1, 1, 1),
)
of(
    "monai",
    "classification",
    "DenseNet121",
    tensors(x=(1, 32, 32)),
    spatial_dims=2,
    **UNETS,
    init_features=8,
    growth_rate=4,
    block_config=(2, 2, 2),
)
of(
    "monai",
    "classification",
    "EfficientNetBN",
    tensors(inputs=(1, 32, 32)),
    spatial_dims=2,
    model_name="efficientnet-b0",
    in_channels=1,
    num_classes=2,
    pretrained=False,
)
of(
    "monai",
    "classification",
    "ViT 3D",
    solid(16),
    "ViT",
    in_channels=1,
    img_size=(16, 16, 16),
    patch_size=(8, 8, 8),
    hidden_size=24,
    mlp_dim=32,
    num_layers=4,
    num_heads=4,
    classification=True,
)
of(
    "monai",
    "autoencoder",
    "AutoEncoder",
    FLAT,
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    channels=(4, 8),
    strides=(2, 2),
)
of(
    "monai",
    "autoencoder",
    "VQVAE",
    tensors(images=(1, 16, 16)),
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    channels=(8, 8),
    num_res_channels=(8, 8),
    num_res_layers=1,
    downsample_parameters=((2, 4, 1, 1),) * 2,
    upsample_parameters=((2, 4, 1, 1, 0),) * 2,
    num_embeddings=16,
    embedding_dim=8,
)
