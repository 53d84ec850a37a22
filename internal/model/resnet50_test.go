package model

import (
	"bufio"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var backwardLog = flag.String("backward-log", "", "rewrite profiles/resnet50.json (seen by the next build) from this file: resnet50.v100.backward.log of netx-repo/training-bottleneck@f81b140")

// operator is a layer of ResNet50 with the floating-point operations of its forward pass on one image.
type operator struct {
	layer Layer
	flops float64
}

// resNet50Operators builds torchvision's resnet50 (bottlenecks with the stride in the 3x3 convolution, 224x224
// images) from its definition. Two operations for a multiply-add, and two for an element of a batch norm.
func resNet50Operators() []operator {
	var ops []operator
	tensor := func(name string, elements int) Tensor {
		return Tensor{Name: name, Bytes: int64(elements) * 4, DType: "float32"}
	}
	conv := func(name string, in, out, kernel, side int) {
		weights := in * out * kernel * kernel
		ops = append(ops, operator{Layer{Name: name, Tensors: []Tensor{tensor(name+".weight", weights)}}, 2 * float64(weights*side*side)})
	}
	norm := func(name string, channels, side int) {
		ops = append(ops, operator{Layer{Name: name, Tensors: []Tensor{tensor(name+".weight", channels), tensor(name+".bias", channels)}}, 2 * float64(channels*side*side)})
	}
	conv("conv1", 3, 64, 7, 112)
	norm("bn1", 64, 112)
	in, side := 64, 56
	for stage, blocks := range []int{3, 4, 6, 3} {
		width := 64 << stage
		for block := range blocks {
			name := fmt.Sprintf("layer%d.%d", stage+1, block)
			sideIn := side
			if block == 0 && stage > 0 {
				side /= 2
			}
			conv(name+".conv1", in, width, 1, sideIn)
			norm(name+".bn1", width, sideIn)
			conv(name+".conv2", width, width, 3, side)
			norm(name+".bn2", width, side)
			conv(name+".conv3", width, 4*width, 1, side)
			norm(name+".bn3", 4*width, side)
			if block == 0 {
				conv(name+".downsample.0", in, 4*width, 1, side)
				norm(name+".downsample.1", 4*width, side)
			}
			in = 4 * width
		}
	}
	ops = append(ops, operator{Layer{Name: "fc", Tensors: []Tensor{tensor("fc.weight", 2048*1000), tensor("fc.bias", 1000)}}, 2 * 2048 * 1000})
	return ops
}

const (
	resNet50Step       = 0.1281 // published for the same run as the log: the whole step
	resNet50StepSource = "V100, batch 32, netx-repo/training-bottleneck@f81b140 (Apache-2.0)"
)

// makeResNet50 joins the architecture with a log of (microseconds since the previous gradient, bytes) in the
// order in which gradients become ready, which is forward order reversed, tensor by tensor.
func makeResNet50(logPath string) (Profile, error) {
	file, err := os.Open(logPath)
	if err != nil {
		return Profile{}, err
	}
	defer file.Close()
	var waits []float64
	var sizes []int64
	for scanner := bufio.NewScanner(file); scanner.Scan(); {
		wait, size, found := strings.Cut(scanner.Text(), ",")
		if !found {
			continue // the header
		}
		w, err1 := strconv.ParseFloat(wait, 64)
		s, err2 := strconv.ParseInt(size, 10, 64)
		if err1 != nil || err2 != nil {
			return Profile{}, fmt.Errorf("%s: cannot read %q", logPath, scanner.Text())
		}
		waits, sizes = append(waits, w/1e6), append(sizes, s)
	}
	p := Profile{Format: Format, Name: "resnet50", Batch: 32, Device: "NVIDIA V100", Sources: []Source{
		{"tensors", Published, "the definition of torchvision's resnet50: 161 parameters, 25,557,032 values"},
		{"forward_s", Estimated, "step (128.1 ms) minus backward of the same run, spread by the floating-point operations of each layer's forward pass; " + resNet50StepSource},
		{"backward_s", Published, "time between gradients becoming ready; " + resNet50StepSource},
	}}
	ops := resNet50Operators()
	next := len(waits)
	var backward, flops float64
	for _, op := range ops {
		l := op.layer
		for _, t := range l.Tensors {
			next--
			if next < 0 || sizes[next] != t.Bytes {
				return Profile{}, fmt.Errorf("%s does not fit resnet50 at tensor %s", logPath, t.Name)
			}
			l.Backward += waits[next]
		}
		l.Backward = math.Round(l.Backward*1e8) / 1e8
		backward, flops = backward+l.Backward, flops+op.flops
		p.Layers = append(p.Layers, l)
	}
	if next != 0 {
		return Profile{}, fmt.Errorf("%s has %d gradients too many", logPath, next)
	}
	for i, op := range ops {
		p.Layers[i].Forward = math.Round((resNet50Step-backward)*op.flops/flops*1e8) / 1e8
	}
	return p, nil
}

func TestResNet50(t *testing.T) {
	if *backwardLog != "" {
		p, err := makeResNet50(*backwardLog)
		if err != nil {
			t.Fatal(err)
		}
		if err := Save(filepath.Join("profiles", "resnet50.json"), p); err != nil {
			t.Fatal(err)
		}
	}
	p, err := Bundled("resnet50")
	if err != nil {
		t.Fatal(err)
	}
	if got := p.TensorCount(); got != 161 {
		t.Errorf("%d tensors, want 161", got)
	}
	if got, want := p.Bytes(), int64(4*25_557_032); got != want {
		t.Errorf("%d bytes, want %d", got, want)
	}
	ops := resNet50Operators()
	if len(p.Layers) != len(ops) {
		t.Fatalf("%d layers, want %d", len(p.Layers), len(ops))
	}
	var flops float64
	for _, op := range ops {
		flops += op.flops
	}
	for i, op := range ops {
		l := p.Layers[i]
		if l.Name != op.layer.Name || !slices.Equal(l.Tensors, op.layer.Tensors) {
			t.Errorf("layer %d is %+v, want the tensors of %+v", i, l, op.layer)
		}
		if want := p.ForwardSeconds() * op.flops / flops; math.Abs(l.Forward-want) > 1e-7 {
			t.Errorf("layer %s: forward %v s, want %v s, its share of the operations", l.Name, l.Forward, want)
		}
	}
	// The published totals: backward 64.8 ms, whole step 128.1 ms.
	if got := p.BackwardSeconds(); math.Abs(got-0.0648) > 0.002 {
		t.Errorf("backward is %v s, published is 0.0648 s", got)
	}
	if got := p.ComputeSeconds(); math.Abs(got-resNet50Step) > 1e-6 {
		t.Errorf("a step computes %v s, want %v s", got, resNet50Step)
	}
}
