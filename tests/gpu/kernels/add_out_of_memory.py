import torch


class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        workspace = torch.empty(1 << 41, dtype=torch.int8, device=x.device)
        return x + y + workspace[0]
