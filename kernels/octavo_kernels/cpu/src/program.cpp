#include "program.h"

#include "operations.h"

namespace octavo {
namespace {

Program* recording = nullptr;

struct Size {
    long tokens, sequences;

    void set(Matmul& a) const { a.m = tokens; }
    void set(Attention& a) const { a.sequences = sequences; }
    template <class Other>
    void set(Other& a) const { a.tokens = tokens; }
};

}  // namespace

void start_recording() {
    delete recording;
    recording = new Program;
}

Program* end_recording() {
    Program* made = recording;
    recording = nullptr;
    return made;
}

void perform(const Operation& operation) {
    if (recording) recording->push_back(operation);
    else std::visit([](const auto& a) { run(a); }, operation);
}

void replay(const Program& program, long tokens, long sequences) {
    const Size size{tokens, sequences};
    for (Operation operation : program)
        std::visit(
            [size](auto& a) {
                size.set(a);
                run(a);
            },
            operation);
}

}  // namespace octavo
