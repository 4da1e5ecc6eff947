#!/usr/bin/env bash
# Measurements on one NVIDIA GPU, section by section (soak.py, contexts.py, published_cuda.py and the like are run by themselves):
#
#     KERNELBENCH=DIRECTORY bash scripts/bench/on_card.sh OUT [SECTION...]
#
# judge        what is judged on a card: tests/gpu, and the attacks while eight are judged at once
# load         the clock beside eight busy workers, against itself and ncu
# speed        the judge's speed beside KernelBench's evaluator; the CUDA corpus by both roads
# generation   tests/gpu/test_generation.py; tokens a second, prefill, groups, turns, start-up; cuts of our kernels
# learner      the update beside Hugging Face's; its kernels
# cold_start   SmolLM2: cold start, 20 RL steps, evaluations; the cold start once more without the diversity filter
# experts      the experts' kernels against eager and torch.compile, three times
# kernelbench  KernelBench's level 1 against itself; its admission
# counters     hardware counters of ten kernels
# learnable    the learnable tasks' experts, naive and wrong kernels
#
# Without sections: all of them. Each command has a time limit, a log in OUT/logs and its result in OUT; one that left a result is
# not run again. PYTHON names another interpreter than .venv's.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: bash scripts/bench/on_card.sh OUT [SECTION...]}
shift
mkdir -p "$out/logs"
out=$(cd "$out" && pwd)
python=${PYTHON:-.venv/bin/python}
kernelbench=${KERNELBENCH:-}
bench=scripts/bench
failed=()

# run NAME SECONDS RESULT COMMAND...: the command, unless OUT/RESULT is there ("-": always)
run() {
    local name=$1 limit=$2 result=$3 started=$SECONDS status
    shift 3
    if [ "$result" != - ] && [ -e "$out/$result" ]; then
        echo "== $name: $result is there"
        return
    fi
    echo "== $name ($(date +%T))"
    PYTHONUNBUFFERED=1 timeout -k 20 "$limit" "$@" > "$out/logs/$name.log" 2>&1
    status=$?
    tail -n "${LINES_SHOWN:-4}" "$out/logs/$name.log" | cut -c1-300
    echo "-- $name: status $status, $((SECONDS - started)) s"
    if [ $status != 0 ]; then failed+=("$name"); fi
}

judge() {
    run tests_gpu 900 - "$python" -m pytest tests/gpu -q --ignore tests/gpu/test_generation.py --ignore tests/gpu/redteam -p no:cacheprovider
    run redteam 400 redteam_gpu.json "$python" $bench/redteam.py --gpu --together 8 --out "$out/redteam_gpu.json"
}

load() {
    run clock_load 600 gpu_clock_load.json "$python" $bench/gpu_clock.py --load 8 --evaluations 8 --only spread,ncu --out "$out/gpu_clock_load.json"
}

speed() {
    run judge_speed 600 judge_speed.json "$python" $bench/judge_speed.py --workers 12 ${kernelbench:+--kernelbench "$kernelbench"} --out "$out/judge_speed.json"
    run cuda_corpus 300 cuda_corpus.json "$python" $bench/cuda_corpus.py --idle 0 --workers 12 --out "$out/cuda_corpus.json"
    run cuda_plain 600 cuda_corpus_plain.json env SANDBOX_ROADS=plain "$python" $bench/cuda_corpus.py --idle 0 --timing none --workers 12 --sample 24 --out "$out/cuda_corpus_plain.json"
}

generation() {
    run test_generation 400 - "$python" -m pytest tests/gpu/test_generation.py -q -p no:cacheprovider
    run attention 200 kernels_attention.json "$python" $bench/kernel_times.py --only attention,first --out "$out/kernels_attention.json"
    run products 300 kernels_products.json "$python" $bench/kernel_times.py --only products --out "$out/kernels_products.json"
    run kernels 300 kernels_generation.json "$python" $bench/kernel_times.py --only decode,prefill,group --out "$out/kernels_generation.json"
    run kernels_large 300 kernels_generation_8b.json "$python" $bench/kernel_times.py --only decode,prefill --models 8b --out "$out/kernels_generation_8b.json"
    run generation 600 generation.json "$python" $bench/generation.py --models 0.6b --only decode,prefill,group,turns,lengths,startup,peer --out "$out/generation.json"
    run generation_large 600 generation_large.json "$python" $bench/generation.py --models 4b,8b --only decode,prefill --batches 64,256 --out "$out/generation_large.json"
}

learner() {
    run kernels_train 200 kernels_train.json "$python" $bench/kernel_times.py --only train --out "$out/kernels_train.json"
    run learner 900 learner.json "$python" $bench/learner.py --remat full,attention,products --out "$out/learner.json"
    run longest 900 longest.json "$python" $bench/learner.py --only train,longest --models 4b --rows 1 --out "$out/longest.json"
}

cold_start() {
    local told=$bench/results/smollm2_triton/journal_corpus.jsonl.gz filtered=$out/smollm2 plain=$out/smollm2_unfiltered
    mkdir -p "$filtered" "$plain"
    [ -e "$filtered/journal_corpus.jsonl" ] || gunzip -c $told > "$filtered/journal_corpus.jsonl"
    run cold_start 1800 - "$python" scripts/train.py --config=configs/smollm2_triton.py --workdir="$filtered" --config.rl.steps=20
    [ -e "$plain/corpus.jsonl" ] || cp "$filtered/corpus.jsonl" "$plain/" 2> /dev/null
    run unfiltered 900 - "$python" scripts/train.py --config=configs/smollm2_triton.py --workdir="$plain" --config.corpus.diversity.on=False --mode=eval_sft
}

experts() {
    for number in 1 2 3; do
        run "experts_$number" 600 - "$python" scripts/evaluate.py --config=configs/smollm2_triton.py --workdir="$out/experts_$number" --policy=expert --split=all \
            "--config.sandbox.baselines=('eager','torch.compile')"
    done
}

kernelbench() {
    [ -n "$kernelbench" ] || { echo "== kernelbench: set KERNELBENCH to a checkout" && failed+=(kernelbench) && return; }
    run self_mode 900 - "$python" $bench/self_mode.py --kernelbench "$kernelbench" --out "$out/self_mode.json" --minutes 14
    run admission 900 - "$python" scripts/admission.py --config=configs/smollm2_triton.py --workdir="$out/admission" --config.tasks.source=kernelbench \
        --config.tasks.directory="$kernelbench" "--config.tasks.levels=(1,)"
}

counters() {
    run ncu_profile 400 ncu_profile.json "$python" $bench/ncu_profile.py --out "$out/ncu_profile.json"
}

learnable() {
    run learnable 900 learnable_tasks.json "$python" $bench/learnable_tasks.py --device cuda:0 --workers 8 --out "$out/learnable_tasks.json"
}

[ $# -gt 0 ] || set -- judge load speed generation learner cold_start experts kernelbench counters learnable
for section in "$@"; do
    case $section in
        judge | load | speed | generation | learner | cold_start | experts | kernelbench | counters | learnable) "$section" ;;
        *) echo "no section $section; see the head of $0" && exit 2 ;;
    esac
done
[ ${#failed[@]} = 0 ] || { echo "not as they should be: ${failed[*]}" && exit 1; }
