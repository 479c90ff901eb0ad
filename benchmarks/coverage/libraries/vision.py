"""Image encoders, contrastive and self-supervised models, detectors."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.coverage.libraries.entry import Entry, Module, image, tokens

__all__ = ["ENTRIES"]

_byol = Module("byol_pytorch")
_clip = Module("open_clip")
_efficient = Module("efficientnet_pytorch")
_face = Module("facenet_pytorch")
_heads = Module("lightly.models.modules")
_kornia = Module("kornia.models.tiny_vit")
_hardnet = Module("kornia.feature")
_resnets = Module("torchvision.models")
_simclr = Module("lightly.models")
_vit = Module("vit_pytorch")
_yolo = Module("ultralytics.nn.tasks")

_SMALL = {"dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64, "num_classes": 10}
_PATCHED = {"image_size": 64, "patch_size": 16} | _SMALL


def _of(module: str, name: str, **options: Any) -> nn.Module:
    made: nn.Module = getattr(Module(f"vit_pytorch.{module}"), name)(**options)
    return made


def _clip_model(vision: Any, text: Any) -> nn.Module:
    made: nn.Module = _clip.CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text)
    return made


def _clip_text() -> Any:
    return _clip.CLIPTextCfg(context_length=16, vocab_size=64, width=32, heads=2, layers=2)


def _byol_model() -> nn.Module:
    made: nn.Module = _byol.BYOL(
        _resnets.resnet18(num_classes=10), image_size=32, projection_size=16, projection_hidden_size=64
    )
    return made


def _yolo_model(kind: str, configuration: str) -> nn.Module:
    made: nn.Module = getattr(_yolo, kind)(configuration, nc=10, verbose=False)
    return made


def _projected(head: nn.Module) -> nn.Module:
    """A backbone with lightly's head, as in its documentation."""
    backbone = _resnets.resnet18()
    backbone.fc = nn.Identity()
    return nn.Sequential(backbone, head)


def _nest() -> dict[str, Any]:
    return {
        **{"image_size": 64, "patch_size": 8, "dim": 16, "heads": 2, "num_hierarchies": 2},
        **{"block_repeats": (1, 1), "num_classes": 10},
    }


def _max() -> dict[str, Any]:
    return {
        **{"num_classes": 10, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4},
        **{"mbconv_expansion_rate": 2, "mbconv_shrinkage_rate": 0.25, "dropout": 0.1},
    }


ENTRIES = (
    Entry("vit-pytorch", "ViT", lambda: _vit.ViT(**_PATCHED, dropout=0.1), lambda: (image(),)),
    Entry("vit-pytorch", "SimpleViT", lambda: _vit.SimpleViT(**_PATCHED), lambda: (image(),)),
    Entry("vit-pytorch", "DeepViT", lambda: _of("deepvit", "DeepViT", **_PATCHED), lambda: (image(),)),
    Entry("vit-pytorch", "CaiT", lambda: _of("cait", "CaiT", **_PATCHED, cls_depth=1), lambda: (image(),)),
    Entry(
        "vit-pytorch",
        "CCT",
        lambda: _of(
            *("cct", "CCT"),
            img_size=64,
            embedding_dim=32,
            n_conv_layers=1,
            kernel_size=7,
            stride=2,
            padding=3,
            pooling_kernel_size=3,
            pooling_stride=2,
            pooling_padding=1,
            num_layers=2,
            num_heads=2,
            mlp_ratio=2.0,
            num_classes=10,
        ),
        lambda: (image(),),
    ),
    Entry("vit-pytorch", "PiT", lambda: _of("pit", "PiT", **_PATCHED | {"depth": (1, 1)}), lambda: (image(),)),
    Entry(
        "vit-pytorch",
        "CvT",
        lambda: _of("cvt", "CvT", num_classes=10, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=32, s3_depth=1),
        lambda: (image(),),
    ),
    Entry("vit-pytorch", "NesT", lambda: _of("nest", "NesT", **_nest()), lambda: (image(),)),
    Entry("vit-pytorch", "MaxViT", lambda: _of("max_vit", "MaxViT", **_max()), lambda: (image(3, 64, 64),)),
    Entry(
        "vit-pytorch",
        "XCiT",
        lambda: _of("xcit", "XCiT", **_PATCHED, cls_depth=1, layer_dropout=0.05),
        lambda: (image(),),
    ),
    Entry(
        "open_clip_torch",
        "CLIP ViT",
        lambda: _clip_model(
            _clip.CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=16, image_size=64), _clip_text()
        ),
        lambda: (image(), tokens()),
    ),
    Entry(
        "open_clip_torch",
        "CLIP ResNet",
        lambda: _clip_model(_clip.CLIPVisionCfg(layers=(1, 1, 1, 1), width=16, image_size=64), _clip_text()),
        lambda: (image(), tokens()),
    ),
    Entry("byol-pytorch", "BYOL", _byol_model, lambda: (image(3, 32, 32),)),
    Entry("lightly", "SimCLR", lambda: _projected(_heads.SimCLRProjectionHead(512, 64, 32)), lambda: (image(),)),
    Entry("lightly", "DINO", lambda: _projected(_heads.DINOProjectionHead(512, 64, 32, 128)), lambda: (image(),)),
    Entry("lightly", "ResNetGenerator", lambda: _simclr.ResNetGenerator("resnet-9"), lambda: (image(3, 32, 32),)),
    Entry(
        "kornia",
        "TinyViT",
        lambda: _kornia.TinyViT(
            img_size=64,
            num_classes=10,
            embed_dims=(16, 32, 32, 64),
            depths=(1, 1, 2, 1),
            num_heads=(1, 2, 2, 4),
            window_sizes=(4, 4, 4, 2),
        ),
        lambda: (image(),),
    ),
    Entry("kornia", "HardNet", lambda: _hardnet.HardNet(pretrained=False), lambda: (image(1, 32, 32),)),
    Entry(
        "efficientnet_pytorch",
        "EfficientNet",
        lambda: _efficient.EfficientNet.from_name("efficientnet-b0", num_classes=10),
        lambda: (image(),),
    ),
    Entry(
        "facenet-pytorch",
        "InceptionResnetV1",
        lambda: _face.InceptionResnetV1(pretrained=None, classify=True, num_classes=10),
        lambda: (image(3, 96, 96),),
    ),
    Entry("ultralytics", "YOLO11n", lambda: _yolo_model("DetectionModel", "yolo11n.yaml"), lambda: (image(),)),
    Entry("ultralytics", "YOLOv8n", lambda: _yolo_model("DetectionModel", "yolov8n.yaml"), lambda: (image(),)),
    Entry(
        "ultralytics", "YOLO11n-cls", lambda: _yolo_model("ClassificationModel", "yolo11n-cls.yaml"), lambda: (image(),)
    ),
    Entry(
        "ultralytics", "YOLO11n-seg", lambda: _yolo_model("SegmentationModel", "yolo11n-seg.yaml"), lambda: (image(),)
    ),
)
