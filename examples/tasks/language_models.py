"""Language models as they are fine-tuned: a model with its own loss, LoRA, a Trainer and an
SFTTrainer.

trainpace forecast examples/tasks/language_models.py:own_loss --gpu A100 --batch 8 --precision
amp_bf16 trainpace forecast examples/tasks/language_models.py:trainer --gpu A100

The models are small and random, the tokens too: put your own in their place.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 512, 64


def model():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


def samples(count=64):
    return [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCABULARY, (count, LENGTH))
    ]


def own_loss():
    """The loss is None: the model returns one, since its samples hold labels."""
    llama = model()
    return llama, None, torch.optim.AdamW(llama.parameters()), samples()


def lora():
    """Adapters of peft; what they leave frozen has no gradients and no optimizer states."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    return adapted, None, torch.optim.AdamW(trained), samples()


def trainer(optim="adamw_torch"):
    """Batch, accumulation, precision, optimizer and checkpointing are those of the arguments,
    unless the command has others.
    """
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        bf16=True,
        gradient_checkpointing=True,
        optim=optim,
        report_to="none",
    )
    return Trainer(model=model(), args=arguments, train_dataset=samples())


def trainer_8bit():
    """bitsandbytes need not be installed for a forecast."""
    return trainer(optim="adamw_bnb_8bit")


def sft():
    """TRL's, on texts of different lengths, which it cuts into tokens and pads."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", pad_token="w2"
    )
    texts = Dataset.from_dict(
        {"text": [" ".join(f"w{j}" for j in range(3, 20 + i)) for i in range(32)]}
    )
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_length=LENGTH,
        report_to="none",
    )
    return SFTTrainer(model=model(), args=arguments, train_dataset=texts, processing_class=fast)
